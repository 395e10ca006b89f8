"""The results that the README tells in sentences, and in one line each."""

from collections.abc import Callable, Iterator
from typing import Any

from view import Result, and_join, cells, span

Line = tuple[str, str, str]  # name, measured value, baseline
MOST_PUBLISHED = 512  # ranks; lengths of more are drawn


def rows_of(result: Result, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if all(row[key] == x for key, x in wanted.items())]


def only(result: Result, **wanted: object) -> dict[str, Any]:
    """Returns the row, or nothing."""
    return next(iter(rows_of(result, **wanted)), {})


def balance(result: Result) -> Iterator[str]:
    rows = {(x["lengths"], x["world_size"], x["algorithm"]): x for x in result["rows"]}
    shares = [
        placed["busiest_ms"] / ring["busiest_ms"]
        for (*case, name), placed in rows.items()
        if name == "placed" and (ring := rows.get((*case, "ring")))
    ]
    if shares:
        yield (
            "**Balance**: with tokens placed by `place_tokens`, attention of packed documents "
            f"takes {span(shares)} of the time of a contiguous ring, on the busiest of "
            f"{and_join(x['world_size'] for x in result['rows'])} ranks, each measured alone, "
            "without exchanges."
        )


def attention(result: Result) -> Iterator[str]:
    methods = "jax.nn, sharded by XLA", "zigzag"
    dense, zigzag = (
        only(result, case="causal", dtype="float32", method=name).get("ms") for name in methods
    )
    if dense and zigzag:
        yield (
            "**Attention**: causal `zigzag` attention over virtual CPU devices is "
            f"{dense / zigzag:.1f} times as fast as `jax.nn.dot_product_attention` sharded by XLA."
        )


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
    ours, theirs = (only(result, devices=devices, what=x) for x in ("dispatch", "ppermute"))
    if ours and theirs:
        yield (
            f"`dispatch` inside `lax.scan`, {devices} devices, {result['title']}",
            f"{ours['loop_us']} µs",
            f"`ppermute`: {theirs['loop_us']} µs",
        )


def processes(result: Result) -> Iterator[Line]:
    most = max(row["MB"] for row in result["rows"])
    donated = rows_of(result, what="dispatch into a donated window", MB=most)
    if donated:
        yield (
            f"`dispatch` between {and_join(row['processes'] for row in donated)} processes, "
            f"{most} MB, into a donated window",
            f"{span(row['of_memcpy'] for row in donated)} of memcpy",
            f"{span(row['times_gloo'] for row in donated)} times as fast as the faster gloo "
            "collective",
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
    both = {"dtype": "float32", "pass": "forward_backward"}
    causal, packed = (only(result, case=case, **both) for case in ("causal", "packed"))
    if causal and packed:
        yield (
            f"`local_attention`, {result['title'].split(', ')[1]}, forward and backward",
            f"{causal['share_of_float32_matmul']} of a matrix product's rate",
            f"packed: {packed['times_faster']} times as fast as `jax.nn` with a mask",
        )


def planner(result: Result) -> Iterator[Line]:
    ranks = max(x for row in result["rows"] if (x := row["world_size"]) <= MOST_PUBLISHED)
    plans = rows_of(result, world_size=ranks)
    tokens = and_join(f"{row['tokens_per_rank']:,}" for row in plans)
    yield (
        f"`plan_attention`, {ranks} ranks of {tokens} tokens",
        f"{span(row['plan_ms'] for row in plans)} ms",
        f"work max/mean {span(row['imbalance_before'] for row in plans)} before planning, "
        f"at most {max(row['imbalance'] for row in plans):.3f} after",
    )


SENTENCES: dict[str, Callable[[Result], Iterator[str]]] = {
    "balance": balance,
    "attention": attention,
}
LINES: tuple[Callable[[Result], Iterator[Line]], ...] = (
    *(dispatch, latency, processes, comm_gemm, scaling, local_attention, planner),
)  # named after their result files


def highlights(found: dict[str, Result]) -> list[str]:
    """Returns results as sentences."""
    return [f"- {x}" for name, of in SENTENCES.items() if name in found for x in of(found[name])]


def other_results(found: dict[str, Result]) -> list[str]:
    """Returns one line per result, with the alternative that a user would take."""
    lines = [line for of in LINES if of.__name__ in found for line in of(found[of.__name__])]
    return [
        "**Other results.** See [all tables](docs/benchmarks.md), with machine and versions.",
        "",
        cells("", "measured", "baseline or note"),
        "|---|---|---|",
        *(cells(*line) for line in lines),
    ]
