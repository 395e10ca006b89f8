"""Renders the results of planning as sections of docs/benchmarks.md, like `sections`."""

from collections.abc import Callable

from sections import NONE, Result, and_join, section


def metadata(result: Result) -> list[str]:
    def cells_of(row: dict) -> list[str]:
        sizes = f"{row['world_size']} × {row['num_shards']}"
        memory = f"{row['temp_bytes'] / 1e6:.1f}"
        times = f"{row['ms']:.2f}", f"{row['numpy_ms']:.2f}", f"{row['compile_s']:.1f}"
        return [sizes, *times, memory]

    replicas = and_join(row["num_replicas"] for row in result["rows"])
    return section(
        "**Planning metadata.** `compute_metadata`, `compute_metadata_kv` and "
        f"`compute_attn_layout_seqlens` in one program with {replicas} replicas, compared with "
        "vectorised NumPy. Times are interleaved medians.",
        "<ranks × slots> | ms | NumPy ms | compile s | extra memory MB",
        map(cells_of, result["rows"]),
        result,
    )


def planner(result: Result) -> list[str]:
    def cells_of(row: dict) -> list[object]:
        others = [row.get(name) for name in ("inside_jit", "greedy")]
        by_others = [NONE if x is None else f"{x['bytes_per_token']:,}" for x in others]
        work = f"{row['imbalance_before']:.2f}", f"{row['imbalance']:.4f}"
        moved = f"{row['q_moved_share']:.3f}", f"{row['kv_moved_share']:.3f}"
        mine = f"{row['bytes_per_token']:,}"
        size = f"{row['plan_bytes'] / 1e6:.2f}"
        names = row["lengths"], row["world_size"], row["num_kv_heads"]
        return [*names, row["plan_ms"], size, *work, *moved, mine, *by_others]

    fields = ("tokens_per_rank", "num_heads", "head_size")
    tokens, heads, size = (and_join(row[name] for row in result["rows"]) for name in fields)
    return section(
        f"**Balanced attention plans.** {tokens} tokens per rank. Planning time is processor "
        "time of one thread, from the lengths to the plan. Work is max/mean of the query-key pairs "
        "per rank. "
        "Moved queries and keys are per token. Bytes are per token and layer, forward, with "
        f"{heads} query heads of {size} in bfloat16. The last two columns are the plan in blocks, "
        "made inside `jit`, and a published planner, reimplemented from its description, with the "
        "same tolerance (`benchmarks/peer_placements.py`). Lengths come from "
        "[published data](../tests/data/README.md); of the most ranks from a log-normal one.",
        "<lengths> | ranks | KV heads | planning ms | plan MB | work before | after | q moved | "
        "kv moved | bytes | inside jit | greedy",
        map(cells_of, result["rows"]),
        result,
    )


def placement(result: Result) -> list[str]:
    def cells_of(row: dict) -> list[object]:
        peers = [row.get(name) for name in ("greedy", "min_heap")]
        by_peers = [NONE if peer is None else f"{peer['bytes_per_token']:,}" for peer in peers]
        keys = f"{row['kv_moved_share']:.3f}", f"{row['least_kv_moved_share']:.3f}"
        mine = f"{row['bytes_per_token']:,}"
        names = row["lengths"], row["world_size"]
        times = (row.get(name, NONE) for name in ("plan_ms", "nodes_plan_ms", "block_plan_ms"))
        return [*names, *times, f"{row['imbalance']:.4f}", *keys, mine, *by_peers]

    fields = ("tokens_per_rank", "num_heads", "num_kv_heads", "head_size")
    tokens, heads, kv_heads, size = (
        and_join(row[name] for row in result["rows"]) for name in fields
    )
    return section(
        f"**Placement.** {tokens} tokens per rank. Planning time is measured from the lengths to "
        "the plan, also for several nodes, and with cuts at multiples of a block. Work is "
        "max/mean of the query-key pairs per rank. Keys moved are per token; the "
        "[bound](placement.md#a-lower-bound) is a lower bound for every plan. Bytes are per token "
        f"and layer, forward, with {heads} query and {kv_heads} KV heads of {size} in bfloat16. "
        "The last two columns are two published planners, reimplemented from their descriptions, "
        "with the same tolerance (`benchmarks/peer_placements.py`). See [placement](placement.md).",
        "<lengths> | ranks | planning ms | with nodes | with blocks | work | keys moved | bound | "
        "bytes | greedy | min-heap",
        map(cells_of, result["rows"]),
        result,
    )


def placement_limits(result: Result) -> list[str]:
    def cells_of(row: dict) -> list[object]:
        names = "limit_per_token", "imbalance", "least_imbalance"
        numbers = ([f"{step[name]:.2f}" for name in names] for step in row["steps"])
        steps = ", ".join(f"{limit}: {work} ({bound})" for limit, work, bound in numbers)
        return [row["lengths"], row["world_size"], f"`{row['limit']}`", steps]

    return section(
        f"**Placement under limits.** {and_join(row['tokens_per_rank'] for row in result['rows'])} "
        "tokens per rank. Each limit from generous to tight, "
        "per token of a rank; behind it the work, as max/mean, and in parentheses a lower bound "
        "from a single rank. See [constraints](placement.md#constraints).",
        "<lengths> | ranks | <limit> | <limit per token: work (bound)>",
        map(cells_of, result["rows"]),
        result,
    )


ALL: tuple[Callable[[Result], list[str]], ...] = (metadata, planner, placement, placement_limits)
