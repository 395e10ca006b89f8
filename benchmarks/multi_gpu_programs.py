"""What multi_gpu.py measures: sizes, and programs over all ranks.

Programs are traced, compiled, timed over all processes, and read. A section traces its programs
before the processes connect: the exchanges that it finds say how much symmetric memory they need.
"""

import dataclasses
import functools
import itertools
import math
import re
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from jax_cp_dispatch import available_implementations
from jax_cp_dispatch._dispatch.arguments import Exchange
from jax_cp_dispatch._dispatch.lowering import channel_of
from jax_cp_dispatch._ranks.implementations import program_platform
from jax_cp_dispatch._ranks.job import is_in_job, publish_and_read_all
from jax_cp_dispatch.gpu import raise_gpu_errors
from jax_cp_dispatch.tools import call_seconds

SAMPLE = 0.02  # seconds; a sample has as many calls, up to MOST_CALLS
LONGEST = 20.0  # seconds of all samples of a program
MOST_CALLS = 50
WAIT = 600.0  # seconds for another process
_COLLECTIVES = re.compile(
    r" ((?:ragged-)?all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
_OURS = re.compile(r'custom_call_target="jax_cp_dispatch\.(\w+)')
_numbers = itertools.count()

# ---- Full sizes, quick ones for a report, and tiny ones for CPU devices.


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The defaults are sizes of use.

    Attributes:
      rounds: samples of each program; each is the mean of calls in a row.
      moved: bytes per GPU of an exchange.
      beside: those that are also measured beside a GEMM, and with fewer multiprocessors.
      square: rows and columns of that GEMM.
      tokens: per GPU, of attention.
      heads, kv_heads, head_size, dtype: of attention.
      causal, packed: algorithms of one document, and of packed ones.
      apart: tokens per GPU from which each algorithm of attention has processes of its own, since
        their channels together would leave too little memory.
      gemms: (M, K, N) of global size, of an all-gather GEMM; transposed of a reduce-scatter one.
      transport: that the gate requires; None: any but XLA's collectives.
    """

    rounds: int = 20
    moved: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 28, 1 << 30)
    beside: tuple[int, ...] = (1 << 26, 1 << 28)
    square: int = 8192
    tokens: tuple[int, ...] = (8192, 32768, 131072)
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    causal: tuple[str, ...] = ("ring", "zigzag", "balanced")
    packed: tuple[str, ...] = ("zigzag", "balanced", "placed")
    apart: int = 131072
    gemms: tuple[tuple[int, int, int], ...] = ((8192, 4096, 28672), (32768, 8192, 8192))
    transport: str | None = None


FULL = Sizes()
SIZES = {
    "full": FULL,
    "quick": dataclasses.replace(
        FULL, rounds=5, moved=(1 << 10, 1 << 20, 1 << 26), beside=(1 << 26,), tokens=(8192,),
        gemms=FULL.gemms[:1],
    ),
    "tiny": Sizes(
        rounds=2, moved=(1 << 16,), beside=(1 << 16,), square=64, tokens=(64,), heads=2,
        kv_heads=1, head_size=8, dtype="float32", gemms=((64, 16, 64),),
        causal=("ring",), packed=("placed",),
    ),
}  # fmt: skip


ONE_QUEUE = "gate 1"  # with CUDA_DEVICE_MAX_CONNECTIONS=1; "gate" has it unset


def sections_of(sizes: Sizes) -> list[str]:
    """Returns the names of the sections, in their order."""
    cases = {"causal": sizes.causal, "packed": sizes.packed}
    attention = []
    for tokens in sizes.tokens:
        for case, algorithms in cases.items():
            own = [f" {name}" for name in algorithms] if tokens >= sizes.apart else [""]
            attention += [f"{case} {tokens}{name}" for name in own]
    return ["gate", ONE_QUEUE, "movement", "gemm", *attention, "maxtext"]


def runs_of(sizes: Sizes) -> list[str]:
    """Returns the sections that share processes, joined by commas: tiny ones all after the gate."""
    *gates, movement = sections_of(sizes)[:3]
    others = [movement, *sections_of(sizes)[3:]]
    return [*gates, ",".join(others)] if sizes == SIZES["tiny"] else [*gates, *others]


# ---- Programs.


class Program:
    """A jitted function of global arrays: traced at once, compiled at its first call.

    `options` are XLA's, for this program alone.
    """

    def __init__(self, jitted: Any, *shapes: Any, options: dict[str, Any] | None = None):
        self._traced, self._options = jitted.trace(*shapes), options
        self._compiled: Any = None

    def __call__(self, *operands: Any) -> Any:
        return self.compiled(*operands)

    @property
    def compiled(self) -> Any:
        if self._compiled is None:
            self._compiled = self._traced.lower().compile(compiler_options=self._options)
        return self._compiled

    @property
    def path(self) -> str:
        """What moves the data: a transport with its calls, and XLA's collectives."""
        text = self.compiled.as_text()
        ours, theirs = (Counter(regex.findall(text)) for regex in (_OURS, _COLLECTIVES))
        found = {f"{transport()}: ": ours, "XLA: ": theirs}
        parts = [
            owner + ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            for owner, counts in found.items()
            if counts
        ]
        return "; ".join(parts) or "nothing moves"

    def exchanges(self) -> Iterator[tuple[Any, int]]:
        """Yields each exchange: what its channel depends on, and the channel's bytes per rank."""
        for equation in _equations(self._traced.jaxpr.jaxpr):
            exchange = equation.params.get("exchange")
            # The second call of a pair uses the channel of the first.
            if isinstance(exchange, Exchange) and not equation.primitive.name.endswith("_done"):
                avals = [operand.aval for operand in equation.invars]
                sent = exchange.split(avals)[1]
                yield channel_of(exchange, avals, sent, network=len(set(hosts())) > 1)


def transport() -> str:
    """Returns the implementation that programs over all ranks use."""
    return next(name for name, row in available_implementations().items() if row.available)


def symmetric_bytes(programs: Iterable[Program]) -> int:
    """Returns the symmetric memory for all exchanges: calls that are alike share a channel."""
    channels = dict(pair for program in programs for pair in program.exchanges())
    return sum(channels.values())


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations; of a choice by platform, those of the branch for this one."""
    for equation in jaxpr.eqns:
        yield equation
        inner = dict(equation.params)
        if platforms := inner.get("branches_platforms"):
            own = next(
                i for i, names in enumerate(platforms) if not names or program_platform() in names
            )
            inner = {"branch": inner["branches"][own]}
        for value in jax.tree.leaves(list(inner.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _equations(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def of_all(what: str, value: Any) -> list[Any]:
    """Returns the values of all processes, which call it in the same order."""
    if not is_in_job():
        return [value]
    return publish_and_read_all("multi_gpu", f"{what} {next(_numbers)}", value, WAIT)


@functools.cache
def hosts() -> list[str]:
    """Returns the host of each process."""
    return of_all("hosts", socket.gethostname())


def failing(runs: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Runs each once; returns the error, by name, of those that fail in any process."""
    errors = {}
    for name, run in runs.items():
        reason = ""
        try:
            jax.block_until_ready(run())
            raise_gpu_errors()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:500]
        if reason := next(filter(None, of_all(f"first {name}", reason)), ""):
            errors[name] = reason
    return errors


def timed(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Measures runs in turn; returns median and 99th percentile over samples of all processes.

    Args:
      runs: by name; the same in all processes.
      rounds: samples of each; fewer, but at least 3, of those that would take longer than LONGEST.
    """
    # Of virtual CPU devices, programs in flight may wait for each other's threads.
    most = MOST_CALLS if program_platform() == "cuda" else 1
    calls, samples = {}, {}
    for name, run in runs.items():
        seconds = max(of_all(name, call_seconds(run)))
        calls[name] = int(min(max(1.0, SAMPLE // seconds), most))
        samples[name] = min(rounds, max(3, int(LONGEST // seconds)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            if number < samples[name]:
                times[name].append(call_seconds(run, calls[name]))
    raise_gpu_errors()
    result = {}
    for name, own in times.items():
        everywhere = sorted(itertools.chain(*of_all(name, own)))
        result[name] = {
            "us": 1e6 * statistics.median(everywhere),
            "p99_us": 1e6 * everywhere[math.ceil(0.99 * len(everywhere)) - 1],
            "samples": len(everywhere),
            "calls": calls[name],
        }
    return result
