"""Measures attention over 8 virtual devices, 8 heads of 64, forward and backward, interleaved.

Cases: one causal document, packed documents, one document with full attention. Methods: those of
`context_parallel_attention` on contiguous tokens; `jax.nn.dot_product_attention` under `jit` with
the sequence sharded; the package `ringattention` if it is installed; local attention on one device.
The upper limit is the rate of a matrix product. The packed documents have published lengths; see
tests/data.
"""

from pathlib import Path

import attention_programs as programs
import common
import jax.numpy as jnp
import packing

from jax_cp_dispatch import choose_algorithm
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.documents import document_lengths
from jax_cp_dispatch.tools.programs import square_product

LENGTHS = packing.PUBLISHED / "dist_wlbllm.json"
MATMUL = 2048
METHODS = (*programs.OURS, *programs.VARIANTS, programs.LOCAL, programs.PACKAGE, programs.DENSE)


def cases(num_tokens: int, dtypes: list[str], files: list[Path]) -> list[programs.Case]:
    packed = {
        f"packed, {path.name}": next(packing.published(path, num_tokens))[1] for path in files
    }
    return [
        case
        for dtype in dtypes
        for case in (
            programs.Case("causal", num_tokens, dtype),
            *(
                programs.Case(name, num_tokens, dtype, "causal", ids)
                for name, ids in packed.items()
            ),
            programs.Case("full", num_tokens, dtype, "full"),
        )
    ]


def chosen(case: programs.Case) -> str:
    lengths = None if case.segment_ids is None else document_lengths(case.segment_ids)
    choice = choose_algorithm(
        lengths,
        num_ranks=programs.NUM_RANKS,
        tokens_per_rank=case.num_tokens // programs.NUM_RANKS,
        num_heads=programs.NUM_HEADS,
        num_kv_heads=programs.NUM_HEADS,
        head_size=programs.HEAD_SIZE,
        itemsize=jnp.dtype(case.dtype).itemsize,
        mask=case.mask,
    )
    print(f"  {choice.reason}")
    return choice.algorithm.name


def measure(case: programs.Case, methods: list[str], repeats: int) -> list[dict]:
    ready, reasons = {}, {}
    for method in methods:
        built = programs.program(method, case)
        if isinstance(built, str):
            reasons[method] = built
        else:
            ready[method] = built
    runs = {name: lambda fn=fn, x=operands: fn(*x) for name, (fn, operands) in ready.items()}
    seconds = common.interleaved({"matmul": square_product(MATMUL, "float32"), **runs}, repeats)
    peak = 2 * MATMUL**3 / seconds["matmul"]
    choice = chosen(case)
    rows = []
    for method in methods:
        if method not in ready and method not in reasons:
            continue
        row = {
            "case": case.name,
            "dtype": case.dtype,
            "tokens": case.num_tokens,
            "method": method,
            "chosen": method == choice,
        }
        if method in ready:
            rate = case.flops / seconds[method]
            row |= {"ms": round(1e3 * seconds[method], 1), "GFLOP_per_s": round(rate / 1e9, 1)}
            row["of_matmul"] = round(rate / peak, 3)
        else:
            row["why_not"] = reasons[method]
        rows.append(row)
        value = f"{row['ms']:10.1f} ms {row['of_matmul']:6.2f}" if "ms" in row else row["why_not"]
        mark = "*" if row["chosen"] else " "
        print(f"{case.name:<28}{case.dtype:<10}{method:<28}{mark}{value}", flush=True)
    return rows


def main() -> None:
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--lengths", nargs="*", type=Path, default=[LENGTHS])
    arguments = common.options(parser, tokens=1024, dtypes=["float32"])
    start_cpu_devices(programs.NUM_RANKS)
    rows = []
    for case in cases(arguments.tokens, arguments.dtypes, arguments.lengths):
        rows += measure(case, arguments.methods, arguments.repeats)
    title = "attention over 8 devices, 8 heads of 64, forward and backward"
    common.write(arguments.output, title, rows, programs.PACKAGE)


if __name__ == "__main__":
    main()
