"""Renders the counts of published rules as a section of docs/benchmarks.md, like `sections`."""

from collections.abc import Callable

from sections import NONE, Result, and_join, cells, section

RULES = {
    "placed": "`place_tokens`",
    "hybrid": "hybrid",
    "zigzag": "zigzag, all ranks",
    "groups": "zigzag, fixed groups",
    "whole": "whole documents",
}


def published(result: Result) -> list[str]:
    model = result["model"]
    limits, node = and_join(model["limits"]), model["group"]

    def cells_of(row: dict) -> list[object]:
        rule = RULES[row["method"]] + (f", limit {row['limit']}" if "limit" in row else "")
        moved = (f"{row[name]:,.0f}" for name in ("bytes_per_token", "most_bytes_per_token"))
        steps = (
            f"{row[name]:.2f} ({low:.2f} to {high:.2f})"
            for name in ("step", "step_with_links")
            for low, high in [row[f"{name}_range"]]
        )
        share = f"{100 * row['attention_share']:.0f} %"
        work = f"{row['work']:.2f}", f"{row['tokens']:.2f}"
        return [row["lengths"], row["world_size"], share, rule, *work, *moved, *steps]

    text = (
        "**Published rules beside placement, counted.** Nothing here is timed. "
        f"{model['tokens_per_rank']} tokens per rank; medians of "
        f"{and_join(row['batches'] for row in result['rows'])} batches of published lengths, and "
        "in parentheses the smallest and the largest. `benchmarks/published_rules.py` has the "
        "rules, with their sources: Megatron's scheduler of context-parallel groups (hybrid; each "
        "document on the next power of two of ranks, with the best of the limits of "
        f"{limits} tokens per rank); per-document zigzag of Transformer Engine and PyTorch, over "
        f"all ranks or groups of {node}; and whole documents to the least loaded rank, by the "
        'FLOPs of the step. "Attention" is its share of these FLOPs. Work is the largest number '
        "of query-key pairs divided by the mean; tokens likewise, with padding. If a rule needs "
        "several rounds, after each of which all ranks wait, both add the largest of each round. "
        "Bytes are per token and layer, forward: keys and values "
        f"of {model['num_kv_heads']} KV heads of {model['head_size']} in bfloat16; then those that "
        "the busiest rank sends or receives. The last columns are the time of a step, divided by "
        "that of `place_tokens`: more than one means that `place_tokens` is faster."
    )
    columns = (
        "<lengths> | ranks | attention | <rule> | work | tokens | bytes | busiest rank | step | "
        "step with links"
    )
    table = section(text, columns, map(cells_of, result["rows"]), result)
    return [*table, "", *_assumptions(result), "", *_reported(result)]


def _assumptions(result: Result) -> list[str]:
    model = result["model"]
    backward, node = model["backward"], model["group"]
    return [
        f"The step is that of {model['name']}: {model['GFLOP_per_token']:.1f} GFLOP per token "
        f"forward, and {backward['linear']:.0f} times as many backward; for attention "
        f"{backward['attention']} times. Both run at {model['matmul_flops'] / 1e12:.0f} TFLOP/s, "
        f"so a token's linear layers take as long as {model['pairs_per_token']:,.0f} pairs. The "
        'slowest rank determines the time. "With links" adds the movement of keys, at '
        f"{model['link_bandwidth'] / 1e9:.0f} GB/s per rank in nodes of {node} and "
        f"{model['rail_bandwidth'] / 1e9:.0f} GB/s between nodes. Rings are assumed to hide it "
        "behind attention as far as possible; `place_tokens`, here with nodes, hides nothing. The "
        "model leaves out tiles of kernels, gradients of weights, pipelines and memory."
    ]


def _reported(result: Result) -> list[str]:
    """Returns the factors that others report, the predicted ones, and why they differ."""
    rows = {(row["lengths"], row["world_size"], row["method"]): row for row in result["rows"]}

    def over(method: str, other: str) -> str:
        """Returns the range of the time of `method` divided by that of `other`."""
        spans = []
        for key in ("step", "step_with_links"):
            ratios = [
                row[key] / rows[*where, other][key]
                for (*where, name), row in rows.items()
                if name == method and (*where, other) in rows
            ]
            spans.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else NONE)
        return "; with links ".join(spans)

    predicted = {
        "DistCA": f"fixed groups over `place_tokens`: {over('groups', 'placed')}",
        "Megatron": f"fixed groups over hybrid: {over('groups', 'hybrid')}",
        "TASP": f"zigzag over all ranks over `place_tokens`: {over('zigzag', 'placed')}",
    }
    lines = [
        "Reported gains, at most, and what these counts predict for the nearest pair of rules:",
        "",
        cells("", "reported", "of", "over", "predicted"),
        "|---|---:|---|---|---|",
    ]
    for x in result["reported"]:
        system = f"{x['system']} ({x['source']})"
        guess = predicted[x["system"].split("'")[0]]
        lines.append(cells(system, x["factor"], x["what"], x["baseline"], guess))
    lines += [
        "",
        "Why they differ:",
        "",
        "- DistCA balances attention, as placement does. The gain is about one plus attention's "
        "share times (work − one), where work is that of the baseline. DistCA's baseline is "
        "balanced in part; a fixed group with one long document is not, and the more groups there "
        "are, the longer is the longest document of the batch.",
        "- Megatron's gain is over the same fixed groups. Its estimate of work is the squared "
        "length alone, so ranks with short documents get more tokens than others; that is what "
        "remains for `place_tokens` to gain. A smaller limit balances better and moves more bytes. "
        "A round ends if no document fits or loads agree; in some batches one group gets far too "
        "many documents before that, hence the largest ratios.",
        "- TASP moves the bytes of a ring over more links, for one sequence on all ranks. Its gain "
        "is one of links: without them the rules are equal. Packed documents do not need these "
        "bytes, so `place_tokens` gains most where a ring leaves a node, and nothing inside one. "
        "Trainers avoid rings over many nodes by fixed groups. "
        "[Predictions](choose_an_algorithm.md#predictions) has TASP's own case.",
    ]
    fewer = _better(rows, "bytes_per_token", lambda x: f"{x:,.0f} bytes")
    faster = _better(rows, "step_with_links", lambda x: f"{x:.2f}")
    if fewer:
        lines.append(
            f"- `place_tokens` does not move the fewest bytes everywhere. Fewer: {fewer}; "
            "and whole documents move none."
        )
    if faster:
        lines.append(
            "- The rank with the head of a long document sends it to all ranks with other pieces "
            "of it. That makes it the busiest by far, and nothing hides the time. With links, "
            f"`place_tokens` is therefore not always the fastest: {faster}."
        )
    return lines


def _better(rows: dict[tuple, dict], name: str, form: Callable[[float], str]) -> str:
    """Returns where a rule other than whole documents has less than `place_tokens`, as a text."""
    found: dict[str, list[str]] = {}
    for (lengths, ranks, method), row in rows.items():
        mine = rows.get((lengths, ranks, "placed"))
        if mine and method != "whole" and round(row[name], 2) < round(mine[name], 2):
            place = f"{lengths} on {ranks} ranks ({form(row[name])})"
            found.setdefault(RULES[method], []).append(place)
    return "; ".join(f"{rule} for {and_join(places)}" for rule, places in found.items())


ALL = (published,)
