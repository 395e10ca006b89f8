"""Writes docs/benchmarks.md, and what the README shows of it, from the result files.

python benchmarks/table.py          after `./run bench`
"""

import pathlib
from collections.abc import Iterable

import sections
from sections import ROOT, cells, load

BEGIN, END = "<!-- benchmarks:begin -->\n", "<!-- benchmarks:end -->"


def span(numbers: Iterable[float]) -> str:
    numbers = list(numbers)
    return f"{min(numbers):.2f} to {max(numbers):.2f}"


def summary() -> list[str]:
    """One line per result, beside what a user would take instead."""
    moved = {row["what"]: row for row in load("dispatch")["rows"]}
    window = moved["dispatch into a donated window"]
    other = min(row["ms"] for what, row in moved.items() if what.startswith("all_"))
    shared = load("processes")["rows"]
    most = max(row["MB"] for row in shared)
    donated, fresh = (
        [
            row
            for row in shared
            if row["what"] == f"dispatch into a {kind} window" and row["MB"] == most
        ]
        for kind in ("donated", "fresh")
    )
    loop = {row["what"]: row for row in load("latency")["rows"] if row["devices"] == 8}
    auto = [row for row in load("comm_gemm")["rows"] if row["what"] == "auto"]
    plans = [row for row in load("planner")["rows"] if row["world_size"] == 32]
    local = {
        (row["case"], row["dtype"]): row
        for row in load("local_attention")["rows"]
        if row["pass"] == "forward_backward"
    }
    narrow = [row for row in load("scaling")["rows"] if row["mode"] == "MXFP8_1D_SCALING"]
    share = min(row["of_bfloat16_bytes"] for row in narrow if row["of_bfloat16_bytes"])
    rows = [
        (
            "`dispatch` of 134 MB, 8 devices",
            f"{window['GB_per_s']} GB/s, {window['of_memcpy']} of memcpy",
            f"{other / window['ms']:.0f} times the faster of XLA's two ways",
        ),
        (
            "`dispatch` inside `lax.scan`, 8 devices, 512 bytes per rank",
            f"{loop['dispatch']['loop_us']} µs",
            f"`ppermute`: {loop['ppermute']['loop_us']} µs",
        ),
        (
            f"`dispatch` between 2 and 4 processes, {most} MB, into a donated window; a fresh one",
            f"{span(row['of_memcpy'] for row in donated)} of memcpy; "
            f"{span(row['of_memcpy'] for row in fresh)}",
            f"{span(row['times_gloo'] for row in donated)} times gloo's faster way; "
            f"{span(row['times_gloo'] for row in fresh)}",
        ),
        (
            '`all_gather_matmul`, `matmul_reduce_scatter`, method="auto"',
            f"{span(row['of_xla'] for row in auto)} of the speed of XLA's way",
            f"{len(auto)} shapes on 4 and 8 devices",
        ),
        (
            "the same with MXFP8 operands",
            f"{share:.3f} of bfloat16's bytes",
            f"{span(row['of_bfloat16'] for row in narrow)} of its speed on CPU",
        ),
        (
            "`local_attention`, 8192 tokens, forward and backward",
            f"{local['causal', 'float32']['share_of_float32_matmul']} of a matrix product's rate",
            f"packed: {local['packed', 'float32']['times_faster']} times `jax.nn`'s with a mask",
        ),
        (
            "`plan_attention`, 32 ranks of 65,536 tokens",
            f"{span(row['plan_ms'] for row in plans)} ms",
            f"work max/mean {span(row['imbalance_before'] for row in plans)} before, "
            f"{max(row['imbalance'] for row in plans):.3f} at most after",
        ),
    ]
    return [
        "**The other results** in a line each; [all tables](docs/benchmarks.md), with machine and "
        "versions.",
        "",
        cells("", "measured", "beside it"),
        "|---|---|---|",
        *(cells(*row) for row in rows),
    ]


def text_of(*parts: list[str]) -> str:
    return "\n".join(line for part in parts for line in (*part, ""))


def pages() -> dict[pathlib.Path, str]:
    """What is written where."""
    readme, page = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    shown = text_of(sections.attention("docs/images"), summary())
    head = [
        "# Benchmarks",
        "",
        "Written by `benchmarks/table.py` from `benchmarks/results`, which `./run bench` writes "
        "anew. Each is measured in one run, interleaved with what a user would take instead.",
    ]
    every = text_of(head, *(section() for section in sections.ALL))
    return {readme: f"{before}{BEGIN}{shown}{END}{after}", page: every.rstrip() + "\n"}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
