"""Renders the results of predictions as sections of docs/benchmarks.md, like `sections`."""

import statistics
from collections.abc import Callable

from sections import NONE, Result, and_join, origin, section

GOAL = 0.15  # of the relative error of a prediction


def cost_model(result: Result) -> list[str]:
    """Returns the checks of movement and of attention; the fitted rows are in the file alone."""
    checks = [row for row in result["rows"] if row["use"] == "check"]
    errors = [abs(row["ratio"] - 1) for row in checks]
    text = (
        f"**Cost model**: {result['title']}. The constants were fitted to other measurements of "
        "the same run; these rows check them. Cells give predicted / measured ms, and in "
        "parentheses their ratio."
    )
    if errors:
        mean = sum(errors) / len(errors)
        share = sum(error <= GOAL for error in errors) / len(errors)
        text += (
            f" {share:.0%} of the errors are at most {GOAL:.0%}; the mean is {mean:.0%}, the "
            f"largest {max(errors):.0%}."
        )
    noise = [row["halves_differ"] for row in checks if "halves_differ" in row]
    if noise:
        text += (
            " How well a time is known: the medians of the even and of the odd rounds differ by "
            f"{statistics.median(noise):.0%} in the median, and by at most {max(noise):.0%}."
        )
        if max(errors) > GOAL:
            text += f" It is in the cells whose error is larger than {GOAL:.0%}."
    lines = [text]
    of_attention = ("ranks", "tokens_per_rank", "heads", "documents", "passes")
    for kind, first in (
        ("movement", ("place", "ranks", "MB_per_rank")),
        ("attention", of_attention),
    ):
        rows = [row for row in checks if ("passes" in row) == (kind == "attention")]
        names = list(dict.fromkeys(row["what"] for row in rows))
        table: dict[tuple, dict[str, str]] = {}
        for row in rows:
            table.setdefault(tuple(row[x] for x in first), {})[row["what"]] = _comparison(row)
        columns = " | ".join([*(f"<{x.replace('_', ' ')}>" for x in first), *names])
        cells_of = ([*key, *(found.get(x, NONE) for x in names)] for key, found in table.items())
        if rows:
            lines += ["", *section(f"Checks of {kind}:", columns, cells_of, result)[:-2]]
    return [*lines, "", f"({origin(result)})"]


def _comparison(row: dict) -> str:
    is_off = abs(row["ratio"] - 1) > GOAL and "halves_differ" in row
    known = f", known to {row['halves_differ']:.0%}" if is_off else ""
    return f"{row['predicted_ms']} / {row['measured_ms']} ({row['ratio']:.2f}{known})"


def predicted_nodes(result: Result) -> list[str]:
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["algorithms"]))
    alike: dict[tuple, list[dict]] = {}  # machines with the same times share a row
    for row in result["rows"]:
        ms = tuple(row["algorithms"].get(name, {}).get("ms") for name in names)
        where = row["documents"], row["tokens_per_rank"], row["ranks"]
        alike.setdefault((*where, ms), []).append(row)

    def cells_of(key: tuple, rows: list[dict]) -> list[object]:
        *where, ms = key
        best = min(x for x in ms if x is not None)
        mark = lambda x: f"**{_milliseconds(x)}**" if x == best else _milliseconds(x)
        machines = and_join(row["hardware"].upper() for row in rows)
        return [*where, machines, *(NONE if x is None else mark(x) for x in ms)]

    heads, kv_heads, size, _ = result["heads"]
    return section(
        f"**Predicted, not measured**: {result['title'].split(': ')[-1]}. ms of one layer, forward "
        f"and backward, {heads} query and {kv_heads} KV heads of {size} in bfloat16. **Bold** "
        "marks the shortest time. Planned algorithms have the traffic of their plans. See "
        "[predictions for nodes of GPUs](choose_an_algorithm.md#predictions-for-nodes-of-gpus).",
        " | ".join(["<documents>", "tokens per rank", "ranks", "<hardware>", *names]),
        (cells_of(*item) for item in alike.items()),
        result,
    )


def _milliseconds(value: float) -> str:
    return f"{value:.3g}" if float(f"{value:.3g}") < _THOUSAND else f"{value:,.0f}"


_THOUSAND = 1000

ALL: tuple[Callable[[Result], list[str]], ...] = (cost_model, predicted_nodes)
