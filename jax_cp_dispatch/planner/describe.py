"""Describes plans for people: work, tokens, traffic, capacities, and the ranks with most work."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Num

from jax_cp_dispatch._text import RANKS_HEADER, count, table, table_of_ranks
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.metadata.describe import (
    describe_traffic,
    known,
    rows_between_ranks,
    rows_moved,
)

_NUM_RANKS = 3
_NUM_PIECES = 3

# Says where the `tokens` queries from `row` of `rank` come from.
Where = Callable[[int, int, int], str]


class Piece(NamedTuple):
    """Queries of one document in consecutive rows of a rank.

    Attributes:
      row: the first.
      queries: their number.
      keys: those that at least one of them attends.
      pairs: query-key pairs.
    """

    row: int
    queries: int
    keys: int
    pairs: int


def describe_plan(
    op: str,
    plan: Any,
    *,
    pairs: Num[Any, "..."],
    pairs_before: Num[Any, "..."] | None,
    queries: Metadata | None,
    where: Where | None,
    speeds: Sequence[float] | None = None,
    ranks_per_node: int | None = None,
) -> str:
    """Returns the text of the `describe` methods.

    Args:
      op: the name of the method, whose first part names the plan.
      plan: with `num_tokens`, `kv_metadata`, `kv_capacity` and `local_ranges`; and `q_capacity` if
        queries move.
      pairs, pairs_before: work of each rank, and without the plan.
      queries: metadata of the queries if they move.
      where: describes the origin of queries; None if nothing is known.
      speeds: relative speeds of the ranks, which determine their shares of the work.
      ranks_per_node: consecutive ranks of a node, if keys between nodes are to be counted.
    """
    keys = rows_between_ranks(op, plan.kv_metadata)
    num_ranks = len(keys)
    pairs = known(op, pairs).astype(float)
    computed = np.array([_num_queries(plan, rank) for rank in range(num_ranks)])
    num_tokens = num_ranks * plan.num_tokens
    parts = np.ones(num_ranks) if speeds is None else np.array(speeds)
    shares = pairs.sum() * parts / parts.sum()
    load = pairs / shares if pairs.any() else np.ones(num_ranks)
    part = "the mean" if speeds is None else "its share"
    lines = [
        f"{op.split('.')[0]}: {num_ranks} ranks of {count(plan.num_tokens)} tokens",
        _line("work", _work(pairs, load, pairs_before, speeds is not None)),
        _line(
            "tokens",
            f"{count(computed.sum())} queries, {count(num_tokens - computed.sum())} padding",
        ),
    ]
    traffic, values = {}, {"queries computed": computed}
    if queries is not None:
        traffic["queries"] = rows_between_ranks(op, queries)
    traffic["keys"] = keys
    for what, sent in traffic.items():
        away, own = rows_moved(sent), np.diag(sent)
        share = away / max(num_tokens, 1)
        lines.append(_line(what, f"{count(away)} move ({share:.3f} per token)"))
        values[f"{what} sent to others"] = sent.sum(1) - own
        values[f"{what} received from others"] = sent.sum(0) - own
    if ranks_per_node is not None:
        node = np.arange(num_ranks) // ranks_per_node
        away = int(keys[node[:, None] != node].sum())
        share = away / max(num_tokens, 1)
        text = f"{count(away)} keys move between nodes of {ranks_per_node} ranks"
        lines.append(_line("nodes", f"{text} ({share:.3f} per token)"))
    sizes = {"queries": getattr(plan, "q_capacity", 0), "keys": plan.kv_capacity}
    for what, sent in traffic.items():
        need, size = sent.sum(0), sizes[what]
        used = f"at most {count(need.max())} rows of {what} on rank {need.argmax()}"
        lines.append(_line("capacity", f"{used}; {need.max() / size:.0%} of {count(size)}"))
    rows = table_of_ranks({f"work / {part.split()[1]}": load}, digits=3) + table_of_ranks(values)
    lines += ["", table(RANKS_HEADER, rows)]
    for what, sent in traffic.items():
        lines += ["", describe_traffic(what, sent)]
    lines += ["", "  Ranks with the most work"]
    for rank in np.argsort(-load, kind="stable")[:_NUM_RANKS].tolist():
        lines.append(f"    rank {rank}: {load[rank]:.3f} of {part}{_why(plan, rank, where)}")
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"  {name:<9} {text}"


def _work(pairs: np.ndarray, load: np.ndarray, pairs_before: Any, has_speeds: bool) -> str:
    text = f"{pairs.sum():.3e} query-key pairs; max/mean {load.max():.3f}"
    if has_speeds:
        text += " relative to the ranks' speeds"
    if pairs_before is not None:
        before = np.asarray(pairs_before, float)
        text += f" (before planning {before.max() / (before.mean() or 1):.3f})"
    return text


def _num_queries(plan: Any, rank: int) -> int:
    start, end = (np.asarray(x) for x in plan.local_ranges(rank))
    return int(np.count_nonzero(end > start))


def _why(plan: Any, rank: int, where: Where | None) -> str:
    """Returns the pieces that make most of a rank's work."""
    pieces = pieces_of_rank(*(np.asarray(x) for x in plan.local_ranges(rank)))
    total = max(sum(piece.pairs for piece in pieces), 1)
    largest = sorted(pieces, key=lambda piece: -piece.pairs)[:_NUM_PIECES]
    text = f", in {count(len(pieces))} pieces of documents"
    for piece in largest:
        text += (
            f"\n      {piece.pairs / total:4.0%}: {count(piece.queries)} queries attend to "
            f"{count(piece.keys)} keys"
        )
        if where is not None:
            text += f"; {where(rank, piece.row, piece.queries)}"
    return text


def pieces_of_rank(start: Int[np.ndarray, " q"], end: Int[np.ndarray, " q"]) -> list[Piece]:
    """Returns the pieces of documents in a rank's rows, from the key range of each row."""
    row = np.flatnonzero(end > start)
    if not len(row):
        return []
    start, end = start[row].astype(np.int64), end[row].astype(np.int64)
    width = end - start
    # In a piece, the next row sees the same keys, or those next to them.
    follows = (np.diff(row) == 1) & (start[1:] < end[:-1])
    for step in (np.diff(start), np.diff(end)):
        follows &= (step == 0) | (step == 1)
    first = np.flatnonzero(np.append(True, ~follows))
    last = np.append(first[1:], len(row)) - 1
    columns = (row[first], last - first + 1, end[last] - start[first])
    pairs = np.add.reduceat(width, first)
    return [Piece(*map(int, x)) for x in zip(*columns, pairs, strict=True)]


def sender_of(metadata: Metadata) -> Where:
    """Returns a function that names the ranks from which received rows come."""
    op = "AttentionPlan.describe"
    fields = (metadata.dst_rank, metadata.dst_offset, metadata.seq_len)
    target, first, tokens = (known(op, x).astype(np.int64) for x in fields)

    def where(rank: int, row: int, queries: int) -> str:
        here = (target == rank) & (first < row + queries) & (row < first + tokens)
        senders = np.unique(np.nonzero(here)[0]).tolist()
        if senders == [rank]:
            return "at home"
        names = ["home" if sender == rank else f"rank {sender}" for sender in senders]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"from {', '.join(names[:3])}{more}"

    return where


def column_of(
    source: Int[np.ndarray, " P"], place: Int[np.ndarray, " P"], *, columns: int, num_tokens: int
) -> Where:
    """Returns a function that names the batch row and columns of placed rows."""

    def where(rank: int, row: int, queries: int) -> str:
        index = rank * num_tokens + row
        piece = int(np.searchsorted(place, index, side="right")) - 1
        batch_row, column = divmod(int(source[piece]) + index - int(place[piece]), columns)
        return f"batch row {batch_row}, columns {count(column)} to {count(column + queries)}"

    return where
