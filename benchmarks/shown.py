"""Which rows of a result file docs/benchmarks.md shows, named after the files."""

from collections.abc import Callable, Iterator

from view import Result, Row

RULES = {
    "placed": "`place_tokens`",
    "fewest bytes": "fewest bytes",
    "hybrid": "hybrid (Megatron)",
    "hybrid, these costs": "hybrid, these costs",
    "whole or zigzag": "whole or zigzag (as FlashCP)",
    "blocks": "blocks (DCP)",
    "whole": "whole documents",
    "zigzag": "zigzag, all ranks",
    "groups": "zigzag, fixed groups",
}
VARIANTS = ("hamilton, direct", "hamilton, XLA's all-to-all")
RANKS = (32, 128, 512, 4096)


def with_most(field: str) -> Callable[[Result], Iterator[Row]]:
    """Returns a function to the rows with the largest value of a field."""

    def rows(result: Result) -> Iterator[Row]:
        most = max(row[field] for row in result["rows"])
        return (row for row in result["rows"] if row[field] == most)

    return rows


def attention(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        if row["dtype"] == "float32" and row["method"] not in VARIANTS:
            yield row | {"mark": "**" if row["chosen"] else ""}


def local_attention(result: Result) -> Iterator[Row]:
    rows = result["rows"]
    return (x for x in rows if x["dtype"] == "float32" and x["pass"] == "forward_backward")


def windows(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        if "way" in row:
            cell = "{MB:,.1f} ({busiest:.2f}; {work:.2f}; {steps})".format(**row)
            yield row | {"cell": cell}
        else:
            what = f"window {row['window']}, {row['passes']}"
            yield {"what": what, "way": "halo, zigzag order", "cell": f"{row['ms']:.0f} ms"}
            yield {"what": what, "way": "rings, zigzag order", "cell": f"{row['ring_ms']:.0f} ms"}


def sequence(result: Result) -> Iterator[Row]:
    return (x for x in result["rows"] if "backward" in x["pass"] and "size" not in x)


def scaling(result: Result) -> Iterator[Row]:
    layer = result["rows"][0]["layer"]
    return (x for x in result["rows"] if x["layer"] == layer and "backward" in x["pass"])


def comm_gemm(result: Result) -> Iterator[Row]:
    return (row for row in result["rows"] if row["what"] == "auto")


def planner(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        if row["num_kv_heads"] < row["num_heads"] and row["world_size"] in RANKS:
            yield row | {"plan_MB": row["plan_bytes"] / 1e6}


def placement(result: Result) -> Iterator[Row]:
    return (row for row in result["rows"] if row["world_size"] in RANKS)


def published(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        if row["method"] not in RULES:
            continue
        kB = {name: row[name] / 1e3 for name in row if name.startswith(("bytes_", "most_"))}
        text = (
            "{step_with_links:.2f} ({work:.2f}; {bytes_inside:.1f} + {bytes_between:.1f}, "
            "{most_inside:.1f} + {most_between:.1f})"
        )
        of = row | {"share": f"{row['attention_share']:.0%}"}
        yield of | {"rule": RULES[row["method"]], "cell": text.format(**row | kB)}
        if row["method"] == "placed":
            mean = row["mean_exchange_s"] or 1.0
            cell = f"{row['most_exchange_s'] / mean:.1f}, {row['least_exchange_s'] / mean:.1f}"
            yield of | {"rule": "busiest exchange", "cell": cell}
            yield of | {"rule": "equal work", "cell": f"{row['equal_step']:.2f}"}
            yield of | {"rule": "ms", "cell": f"{row['plan_ms']:.0f}"}
        elif row["method"] == "fewest bytes":
            yield of | {"rule": "its ms", "cell": f"{row['plan_ms']:.0f}"}


def choice(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        if "backward" in row["passes"]:
            yield row | {"documents": len(row["lengths"])}
