"""Measures local attention on one GPU against cuDNN, FlashAttention-3 and `jax.nn` with a mask.

The implementations of one workload run in turn. FLOPs count the matrix products of the visible
query-key pairs: two forward, five backward. Errors are relative, in the 2-norm, against plain
products in float32. FlashAttention-3 is used if `flash_attn3_jax` can be imported. What cannot
compute a workload gets a row with the reason.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attention_workloads as workloads
import common
import device_trace
import jax
from attention_peers import IMPLEMENTATIONS, Unsupported
from attention_workloads import Heads, Workload

from jax_cp_dispatch._text import byte_count
from jax_cp_dispatch.cost import attention_flops
from jax_cp_dispatch.gpu import raise_gpu_errors

FAST, SLOW = 0.005, 0.2  # seconds of a call: measured in batches of ten; measured once
LARGEST_ERROR = 0.02  # of this package's results
PASSES = "forward", "forward_backward"
TRACED_CALLS, LISTED_KERNELS = 3, 8
MEMORY = 0.75  # of JAX's, for the temporary arrays of one program
Runs = dict[tuple[str, str], Callable[[], Any]]  # by implementation and pass


def lowered(name: str, workload: Workload, operands: list[jax.Array]) -> list[Any]:
    """Lowers both passes of an implementation; returns what compiles each, and its operands."""
    attend, of = IMPLEMENTATIONS[name](workload)
    q, k, v, dout = operands

    def both(q, k, v, dout, of):
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, of), q, k, v)
        return out, *pull_back(dout)

    steps = (attend, (q, k, v, of)), (both, (q, k, v, dout, of))
    return [(jax.jit(run).lower(*args).compile, args) for run, args in steps]


def path_of(program: Any) -> str:
    """Says by what this package computes attention, as far as the compiled program shows it."""
    text = program.as_text()
    marks = {"own kernel": 'custom_call_target="jax_cp_dispatch.', "cuDNN": "__cudnn$fmha"}
    found = [what for what, mark in marks.items() if mark in text]
    return " or ".join(found) + ", chosen at run time" * (len(found) > 1) or "blockwise"


def check_memory(program: Any) -> None:
    """Raises Unsupported if a program needs more memory than there is: it would end all others."""
    statistics = jax.devices()[0].memory_stats()
    needed = program.memory_analysis().temp_size_in_bytes
    if statistics and needed > MEMORY * (limit := statistics["bytes_limit"]):
        raise Unsupported(f"it needs {byte_count(needed)} of memory; {byte_count(limit)} are there")


class Measurement:
    """One workload: its programs, their results, and their times."""

    def __init__(self, workload: Workload, implementations: list[str]):
        self.workload, self.implementations = workload, implementations
        self.operands = workload.operands()
        self.runs: Runs = {}
        self.paths: dict[tuple[str, str], str] = {}

    def rows(self, repeats: int) -> Iterator[dict[str, Any]]:
        reasons = self._compile()
        errors = self._errors(reasons)
        seconds = self._seconds(repeats)
        of = self.workload.heads
        for (name, what), value in seconds.items():
            packed = seconds.get(("cudnn_packed", what))
            sizes = {
                "num_heads": of.queries,
                "head_size": of.size,
                "value_head_size": of.value_size,
            }
            count = functools.partial(attention_flops, self.workload.num_pairs, **sizes)
            flops = count() + (count(backward=True) if what != PASSES[0] else 0)
            path = {"path": self.paths[name, what]} if name == "ours" else {}
            yield {
                **self._row(name),
                "pass": what,
                "ms": round(1e3 * value, 3),
                "TFLOP_per_s": round(1e-12 * flops / value, 1),
                "rate_of_cudnn_packed": round(packed / value, 3) if packed else None,
                **{f"error_{x}": float(f"{y:.3g}") for x, y in errors[name, what].items()},
                **path,
            }
        for name, reason in reasons.items():
            yield {**self._row(name), "not_measured": reason}
        self._check(errors, reasons)

    def _row(self, name: str) -> dict[str, Any]:
        of = self.workload
        return {"workload": of.name, "heads": of.heads.name(), "implementation": name}

    def _compile(self) -> dict[str, str]:
        """Compiles all programs at the same time; returns why some cannot compute the workload."""
        reasons, jobs = {}, {}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for name in self.implementations:
                try:
                    steps = lowered(name, self.workload, self.operands)
                except Exception as error:
                    reasons[name] = reason_of(error)
                    continue
                jobs[name] = [(pool.submit(compile), args) for compile, args in steps]
            for name, steps in jobs.items():
                try:
                    programs = [(job.result(), args) for job, args in steps]
                    for program, _ in programs:
                        check_memory(program)
                except Exception as error:
                    reasons[name] = reason_of(error)
                    continue
                for what, (program, args) in zip(PASSES, programs, strict=True):
                    self.runs[name, what] = functools.partial(program, *args)
                    if name == "ours":
                        self.paths[name, what] = path_of(program)
        return reasons

    def _errors(self, reasons: dict[str, str]) -> dict[tuple[str, str], dict[str, float]]:
        """Runs everything once. What fails is no longer measured."""
        visible = jax.numpy.asarray(self.workload.visible)
        wanted = workloads.expected(*self.operands, visible)
        errors = {}
        for (name, what), run in list(self.runs.items()):
            try:
                results = run()
                results = results if what != PASSES[0] else [results]
                named = dict(zip(("out", "dq", "dk", "dv"), results, strict=False))
                found = workloads.relative_errors(named, wanted, visible)
                errors[name, what] = {x: float(y) for x, y in found.items()}
                raise_gpu_errors()
            except Exception as error:
                reasons[name] = reason_of(error)
                self.runs.pop((name, what))
        return errors

    def _seconds(self, repeats: int) -> dict[tuple[str, str], float]:
        measure = lambda runs, **options: common.interleaved(runs, repeats, **options)
        once = common.interleaved(self.runs, 1)
        slow = {x: run for x, run in self.runs.items() if FAST < once[x] <= SLOW}
        fast = {x: run for x, run in self.runs.items() if once[x] <= FAST}
        seconds = once | measure(slow) | measure(fast, calls=10)
        raise_gpu_errors()
        return seconds

    def _check(self, errors, reasons: dict[str, str]) -> None:
        """Raises RuntimeError if this package has not computed the workload."""
        if "ours" in reasons:
            raise RuntimeError(reasons["ours"])
        for (name, what), found in errors.items():
            if name == "ours" and not all(x <= LARGEST_ERROR for x in found.values()):
                raise RuntimeError(f"{what} has relative errors {found}, above {LARGEST_ERROR}")


def reason_of(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"


def profile(measurements: list[Measurement]) -> Iterator[dict[str, Any]]:
    """Says how long the GPU works in a call of this package, and how long in its own kernels."""
    calls = {}
    for of in measurements:
        for (name, what), run in of.runs.items():
            if name == "ours":
                row = {**of._row(name), "pass": what}
                calls[f"attention {len(calls)}"] = row, run

    def run_all():
        for annotation, (_, run) in calls.items():
            with jax.profiler.TraceAnnotation(annotation):
                for _ in range(TRACED_CALLS):
                    jax.block_until_ready(run())

    trace = device_trace.traced(run_all, calls)
    ms = lambda kernels: round(1e-6 * device_trace.busy(kernels) / TRACED_CALLS, 4)
    for annotation, (row, _) in calls.items():
        kernels = trace.within(annotation)
        own = [x for x in kernels if device_trace.OWN_KERNEL.search(x.name)]
        by_name = {name[:80]: ms([x for x in kernels if x.name == name])
                   for name in {x.name for x in kernels}}  # fmt: skip
        longest = sorted(by_name.items(), key=lambda x: -x[1])[:LISTED_KERNELS]
        yield {
            **row,
            "device_ms": ms(kernels),
            "own_kernels_ms": ms(own),
            "kernels": round(len(kernels) / TRACED_CALLS, 1),
            "longest": dict(longest),
        }


def varied(heads: Heads, variant: str) -> Heads:
    """Returns heads of another size, `size` or `size/value_size`, or of another dtype."""
    sizes = [int(x) for x in variant.split("/")] if variant[0].isdigit() else []
    if not sizes:
        return dataclasses.replace(heads, dtype=variant)
    return dataclasses.replace(heads, size=sizes[0], value_size=sizes[-1])


def options() -> argparse.Namespace:
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--tokens", type=int, default=8192, help="of this GPU; a multiple of 8")
    parser.add_argument("--documents", type=int, nargs="+", default=[1000, 8192, 2048, 512, 4096])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="queries, keys")
    parser.add_argument("--size", type=int, default=128, help="of a head")
    variants = ["64", "256", "192/128", "float16"]
    parser.add_argument("--variants", nargs="*", default=variants, help="of heads: sizes, dtypes")
    known = list(IMPLEMENTATIONS)
    parser.add_argument("--implementations", nargs="+", choices=known, default=known)
    return parser.parse_args()


def main() -> None:
    arguments = options()
    queries, keys = arguments.heads
    heads = Heads(queries, keys, arguments.size, arguments.size)
    of_documents = functools.partial(workloads.documents, arguments.tokens)
    lengths = arguments.documents
    makers = {f"documents of {x}": functools.partial(of_documents, x, heads) for x in lengths}
    makers["placed"] = functools.partial(workloads.placed, arguments.tokens, heads)
    makers["shared prefix"] = functools.partial(workloads.shared_prefix, arguments.tokens, heads)
    for x in arguments.variants:
        makers[f"heads of {x}"] = functools.partial(of_documents, lengths[0], varied(heads, x))
    title = f"local attention on one {jax.devices()[0].device_kind}"
    report = common.Report(arguments.output, title, "nvidia-cudnn-cu13", "flash-attn3-jax")
    measured: list[Measurement] = []

    def measure(make):
        measured.append(Measurement(make(), arguments.implementations))
        yield from measured[-1].rows(arguments.repeats)

    for what, make in makers.items():
        report.section(what, functools.partial(measure, make))
    report.section("profile", functools.partial(profile, measured))
    sys.exit(report.has_failed)


if __name__ == "__main__":
    main()
