"""Which rows of a result file docs/benchmarks.md shows, named after the files."""

from collections.abc import Callable, Iterator

from view import Result, Row

RULES = {
    "placed": "`place_tokens`",
    "hybrid": "hybrid",
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
    for row in placement(result):
        if row["method"] in RULES:
            yield row | {"rule": RULES[row["method"]], "share": f"{row['attention_share']:.0%}"}


def choice(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        if "backward" in row["passes"]:
            yield row | {"documents": len(row["lengths"])}
