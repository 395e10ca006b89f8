"""Writes docs/benchmarks.md and the results in the README from the result files.

Run `python benchmarks/table.py`; `./run bench` runs it at its end.
"""

import json
import pathlib
from collections.abc import Iterable, Iterator

import balance_sections
import planning_sections
import prediction_sections
import published_sections
import sections
from sections import Result, and_join, cells, span

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SECTIONS = (
    *balance_sections.ALL,
    *sections.ALL,
    *planning_sections.ALL,
    *published_sections.ALL,
    *prediction_sections.ALL,
)
BEGIN, END = "<!-- benchmarks:begin -->\n", "<!-- benchmarks:end -->"


def rows_of(result: Result, **wanted: object) -> list[dict]:
    return [row for row in result["rows"] if all(row[key] == x for key, x in wanted.items())]


def only(result: Result, **wanted: object) -> dict | None:
    rows = rows_of(result, **wanted)
    return rows[0] if rows else None


Line = tuple[str, str, str]  # name, measured value, baseline


def dispatch(result: Result) -> Iterator[Line]:
    window = only(result, what="dispatch into a donated window")
    others = [row["ms"] for row in result["rows"] if row["what"].startswith("all_")]
    if window and others:
        yield (
            f"`dispatch`{result['title'].removeprefix('dispatch').split(' (')[0]}",
            f"{window['GB_per_s']} GB/s, {window['of_memcpy']} of memcpy",
            f"{min(others) / window['ms']:.0f} times as fast as the faster of two XLA collectives",
        )


def latency(result: Result) -> Iterator[Line]:
    devices = max(row["devices"] for row in result["rows"])
    ours, theirs = (only(result, devices=devices, what=what) for what in ("dispatch", "ppermute"))
    if ours and theirs:
        yield (
            f"`dispatch` inside `lax.scan`, {devices} devices, {result['title']}",
            f"{ours['loop_us']} µs",
            f"`ppermute`: {theirs['loop_us']} µs",
        )


def processes(result: Result) -> Iterator[Line]:
    most = max(row["MB"] for row in result["rows"])
    donated, fresh = (
        rows_of(result, what=f"dispatch into a {kind} window", MB=most)
        for kind in ("donated", "fresh")
    )
    if donated and fresh:
        of_memcpy, times_gloo = (
            [span(row[name] for row in rows) for rows in (donated, fresh)]
            for name in ("of_memcpy", "times_gloo")
        )
        numbers = and_join(row["processes"] for row in donated)
        yield (
            f"`dispatch` between {numbers} processes, {most} MB, "
            "into a donated window; into a fresh one",
            f"{of_memcpy[0]} of memcpy; {of_memcpy[1]}",
            f"{times_gloo[0]} times as fast as the faster gloo collective; {times_gloo[1]}",
        )


def comm_gemm(result: Result) -> Iterator[Line]:
    auto = rows_of(result, what="auto")
    if auto:
        yield (
            '`all_gather_matmul`, `matmul_reduce_scatter`, method="auto"',
            f"{span(row['of_xla'] for row in auto)} times the speed of XLA's collectives and GEMM",
            f"{len(auto)} shapes on {and_join(row['devices'] for row in auto)} devices",
        )


def scaling(result: Result) -> Iterator[Line]:
    narrow = rows_of(result, mode="MXFP8_1D_SCALING")
    shares = [row["of_bfloat16_bytes"] for row in narrow if row["of_bfloat16_bytes"]]
    if shares:
        yield (
            "the same with MXFP8 operands",
            f"{min(shares):.3f} of bfloat16's bytes",
            f"{span(row['of_bfloat16'] for row in narrow)} times bfloat16's speed on CPU",
        )


def local_attention(result: Result) -> Iterator[Line]:
    causal, packed = (
        only(result, case=case, dtype="float32", **{"pass": "forward_backward"})
        for case in ("causal", "packed")
    )
    if causal and packed:
        tokens = result["title"].split(", ")[1]
        yield (
            f"`local_attention`, {tokens}, forward and backward",
            f"{causal['share_of_float32_matmul']} of a matrix product's rate",
            f"packed: {packed['times_faster']} times as fast as `jax.nn` with a mask",
        )


def planner(result: Result) -> Iterator[Line]:
    ranks = max(x for row in result["rows"] if (x := row["world_size"]) <= 512)
    plans = rows_of(result, world_size=ranks)
    tokens = and_join(f"{row['tokens_per_rank']:,}" for row in plans)
    yield (
        f"`plan_attention`, {ranks} ranks of {tokens} tokens",
        f"{span(row['plan_ms'] for row in plans)} ms",
        f"work max/mean {span(row['imbalance_before'] for row in plans)} before planning, "
        f"at most {max(row['imbalance'] for row in plans):.3f} after",
    )


LINES = (dispatch, latency, processes, comm_gemm, scaling, local_attention, planner)


def load(results: pathlib.Path) -> dict[str, Result]:
    """Returns results by name, except those without rows."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    return {name: result for name, result in found.items() if result.get("rows")}


def summary(found: dict[str, Result]) -> list[str]:
    """Returns one line per result, with the alternative that a user would take."""
    lines = [line for of in LINES if of.__name__ in found for line in of(found[of.__name__])]
    return [
        "**Other results**, one line each. See [all tables](docs/benchmarks.md), with machine and "
        "versions.",
        "",
        cells("", "measured", "baseline or note"),
        "|---|---|---|",
        *(cells(*line) for line in lines),
    ]


def highlights(found: dict[str, Result]) -> list[str]:
    """Returns three results as sentences: balance, attention, movement."""
    lines = balance_sections.highlight(found["balance"]) if "balance" in found else []
    if "attention" in found:
        rows = rows_of(found["attention"], case="causal", dtype="float32")
        ms = {row["method"]: row["ms"] for row in rows if "ms" in row}
        if {"zigzag", "jax.nn, sharded by XLA"} <= set(ms):
            lines.append(
                "**Attention**: causal `zigzag` attention over virtual CPU devices is "
                f"{ms['jax.nn, sharded by XLA'] / ms['zigzag']:.1f} times as fast as "
                "`jax.nn.dot_product_attention` sharded by XLA."
            )
    for name, measured, baseline in dispatch(found["dispatch"]) if "dispatch" in found else ():
        lines.append(f"**Movement**: {name}: {measured}; {baseline}.")
    return [f"- {line}" for line in lines]


def introduction(found: dict[str, Result]) -> list[str]:
    took = [result.get("took_s") for result in found.values()]
    seconds = sum(x for x in took if x)
    time = "" if None in took else f" All benchmarks together take {seconds / 60:.0f} minutes."
    return [
        "# Benchmarks",
        "",
        "`benchmarks/table.py` generates this page from `benchmarks/results`; `./run bench` "
        "regenerates both. Each benchmark is one run, interleaved with the alternative that a user "
        "would take." + time,
    ]


def text_of(parts: Iterable[list[str]]) -> str:
    return "\n".join(line for part in parts for line in (*part, ""))


def pages(results: pathlib.Path = RESULTS) -> dict[pathlib.Path, str]:
    """Returns the text of each generated file."""
    found = load(results)
    readme, page = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    images = "docs/images"
    first = [balance_sections.balance(found[x], images) for x in ("balance",) if x in found]
    first += [sections.attention(found[name]) for name in ("attention",) if name in found]
    if "attention_growth" in found:
        first.append(sections.attention_growth(found["attention_growth"], images))
    shown = text_of([highlights(found), *first, summary(found)])
    tables = [of(found[of.__name__]) for of in SECTIONS if of.__name__ in found]
    every = text_of([introduction(found), *tables])
    return {readme: f"{before}{BEGIN}{shown}{END}{after}", page: every.rstrip() + "\n"}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
