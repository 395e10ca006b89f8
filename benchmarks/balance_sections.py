"""Renders the balance of attention in time as a section of docs/benchmarks.md, like `sections`."""

from collections.abc import Callable

from sections import NONE, Result, and_join, section, span


def of_cases(result: Result) -> dict[tuple[str, int], dict[str, dict]]:
    """Returns the rows of each distribution and number of ranks, by algorithm."""
    cases: dict[tuple[str, int], dict[str, dict]] = {}
    for row in result["rows"]:
        case = row["lengths"], row["world_size"]
        cases.setdefault(case, {})[row["algorithm"]] = row
    return cases


def balance(result: Result, images: str = "images") -> list[str]:
    """Returns a table, and a picture from the folder `images`, a path relative to the page."""
    cases = of_cases(result)
    algorithms = dict.fromkeys(row["algorithm"] for row in result["rows"])

    def cell(row: dict | None) -> str:
        if row is None:
            return NONE
        return f"{row['busiest_ms']:.0f} ({row['imbalance']:.2f}; {row['imbalance_of_pairs']:.2f})"

    fields = ("tokens_per_rank", "num_heads", "num_kv_heads", "head_size")
    tokens, heads, groups, size = (and_join(x[name] for x in result["rows"]) for name in fields)
    table = section(
        "**Balance of attention in time.** A step takes as long as its busiest rank. Here the "
        "attention of each rank runs alone on one device, forward and backward, one rank after the "
        f"other, interleaved over rounds; exchanges are not run. {tokens} tokens per rank, {heads} "
        f"query heads and {groups} KV head of {size}, one batch of packed documents of published "
        "lengths (`tests/data/lengths`). Each cell gives the processor time of the busiest rank in "
        "ms, and in parentheses its ratio to the mean: of time, then of query-key pairs.",
        " | ".join(["<>", *(f"{lengths}, {ranks} ranks" for lengths, ranks in cases)]),
        ([name, *(cell(rows.get(name)) for rows in cases.values())] for name in algorithms),
        result,
    )
    picture = (
        f"![Time of the busiest rank and of the mean rank, by algorithm]({images}/balance.svg)"
    )
    return [*table, *_sentences(result), "", picture]


def speed_ups(result: Result) -> list[float]:
    """Returns the time of the busiest rank of a ring over that of placement, in each case."""
    return [
        rows["ring"]["busiest_ms"] / rows["placed"]["busiest_ms"]
        for rows in of_cases(result).values()
        if {"ring", "placed"} <= set(rows)
    ]


def _sentences(result: Result) -> list[str]:
    ratios = speed_ups(result)
    if not ratios:
        return []

    def spans(name: str) -> list[str]:
        rows = [row for row in result["rows"] if row["algorithm"] == name]
        return [span(row[key] for row in rows) for key in ("imbalance", "imbalance_of_pairs")]

    (ring, ring_pairs), (placed, placed_pairs) = spans("ring"), spans("placed")
    return [
        "",
        f"The busiest rank of `ring` takes {span(ratios)} times as long as that of `placed`: this "
        "is the speed-up of attention without exchanges. Busiest over mean is "
        f"{placed} in time and {placed_pairs} in pairs for `placed`, and {ring} and {ring_pairs} "
        "for `ring`. Time does not follow pairs alone, because attention computes whole tiles and "
        "rewrites rows.",
    ]


def highlight(result: Result) -> list[str]:
    """Returns the main result in one sentence, if its rows are there."""
    ratios = speed_ups(result)
    if not ratios:
        return []
    ranks = and_join(row["world_size"] for row in result["rows"])
    return [
        "**Balance**: with tokens placed by `place_tokens`, attention of packed documents takes "
        f"{span(1 / ratio for ratio in ratios)} of the time that it takes in a contiguous ring, on "
        f"the busiest of {ranks} ranks, each measured alone, without exchanges."
    ]


ALL: tuple[Callable[[Result], list[str]], ...] = (balance,)
