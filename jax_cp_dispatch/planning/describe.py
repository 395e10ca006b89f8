"""Describes plans for people: work, tokens, traffic and capacities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from jax_cp_dispatch._text import RANKS_HEADER, count, rank_table, table
from jax_cp_dispatch.metadata.fields import describe_traffic, known, rows_between_ranks, rows_moved


def describe_plan(
    op: str,
    plan: Any,
    *,
    speeds: Sequence[float] | None = None,
    ranks_per_node: int | None = None,
) -> str:
    """Returns the text of the `describe` methods.

    Args:
      op: the method; the text begins with its class.
      plan: a `Plan` of all ranks.
      speeds: relative speeds of the ranks, which determine their shares of the work.
      ranks_per_node: consecutive ranks of a node, if keys between nodes are to be counted.
    """
    name = op.partition(".")[0]
    computed = known(op, plan.num_rows).astype(np.int64)
    if computed.min() < 0:
        return f"{plan.reason} Nothing was planned."
    moves = {"keys": (rows_between_ranks(op, plan.kv_metadata), plan.kv_capacity)}
    if not plan.is_placed:
        queries = rows_between_ranks(op, plan.q_metadata), plan.q_capacity
        moves = {"queries": queries, **moves}
    num_ranks, all_tokens = plan.world_size, plan.world_size * plan.num_tokens
    pairs = known(op, plan.pairs).astype(float)
    before, after = (work_by_share(known(op, x), speeds) for x in (plan.pairs_before, plan.pairs))
    relative = "" if speeds is None else " relative to the ranks' speeds"
    lines = [
        f"{name}: {num_ranks} ranks of {count(plan.num_tokens)} tokens",
        _line(
            "work",
            f"{pairs.sum():.3e} query-key pairs; max/mean {after.max():.3f}{relative} "
            f"(before planning {before.max():.3f}, on rank {before.argmax()})",
        ),
        _line(
            "tokens",
            f"{count(computed.sum())} queries, {count(all_tokens - computed.sum())} padding",
        ),
    ]
    values = {"queries computed": computed}
    for what, (sent, _) in moves.items():
        away, own = rows_moved(sent), np.diag(sent)
        share = away / max(all_tokens, 1)
        lines.append(_line(what, f"{count(away)} move ({share:.3f} per token)"))
        values[f"{what} sent to others"] = sent.sum(1) - own
        values[f"{what} received from others"] = sent.sum(0) - own
    if ranks_per_node is not None:
        _, away = plan.num_tokens_moved_between_nodes(ranks_per_node)
        share = away / max(all_tokens, 1)
        text = f"{count(away)} keys move between nodes of {ranks_per_node} ranks"
        lines.append(_line("nodes", f"{text} ({share:.3f} per token)"))
    for what, (sent, size) in moves.items():
        need = sent.sum(0)
        used = f"at most {count(need.max())} rows of {what} on rank {need.argmax()}"
        lines.append(_line("capacity", f"{used}; {need.max() / size:.0%} of {count(size)}"))
    part = "mean" if speeds is None else "share"
    loads = {f"work / {part} before planning": before, f"work / {part} as planned": after}
    lines += ["", table(RANKS_HEADER, rank_table(loads, digits=3) + rank_table(values))]
    for what, (sent, _) in moves.items():
        lines += ["", describe_traffic(what, sent)]
    return "\n".join(lines)


def describe_mask(layers: int, all_layers: int, plan: Any) -> str:
    """Returns the line of a further mask of a placement."""
    moved = plan.num_kv_tokens_moved
    return (
        f"            {plan.mask}, {layers} of {all_layers} layers: max/mean {plan.imbalance:.3f}; "
        f"{moved:,} keys move"
    )


def by_group(
    texts: Sequence[str], pairs: Float32[np.ndarray, "groups W"], speeds: Sequence[float] | None
) -> str:
    """Joins the texts of groups, which share no work: its balance inside a group, and of all."""
    inside = work_by_share(pairs, speeds).max()
    every = work_by_share(pairs.reshape(-1), None if speeds is None else len(pairs) * tuple(speeds))
    group, rank = divmod(int(every.argmax()), pairs.shape[1])
    first = (
        f"{len(texts)} groups: max/mean {inside:.3f} inside a group, {every.max():.3f} of all "
        f"ranks (rank {rank} of group {group})"
    )
    parts = [f"Group {n} of {len(texts)}\n{text}" for n, text in enumerate(texts)]
    return "\n\n".join([first, *parts])


def work_by_share(pairs: Any, speeds: Sequence[float] | None) -> Float64[np.ndarray, "*groups W"]:
    """Returns the work of each rank, divided by its share of all work; 1 if there is none."""
    pairs = np.asarray(pairs, np.float64)
    of_ranks = np.ones(pairs.shape[-1]) if speeds is None else np.array(speeds)
    share = pairs.sum(-1, keepdims=True) * of_ranks / of_ranks.sum()
    return np.divide(pairs, share, out=np.ones_like(pairs), where=share > 0)


def _line(name: str, text: str) -> str:
    return f"  {name:<9} {text}"


def exceeded(capacities: Mapping[str, int], needs: Any) -> str:
    """Returns in words which capacities the largest needs exceed."""
    largest = np.asarray(needs).reshape(-1, len(capacities)).max(0).tolist()
    values = zip(capacities.items(), largest, strict=True)
    texts = [f"{name} {size}: it needs {need}" for (name, size), need in values if need > size]
    return "; ".join(texts) or "a constraint of its config"
