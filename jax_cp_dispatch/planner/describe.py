"""Describes plans for people: work, tokens, traffic, capacities, and the ranks with most work."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Int32

from jax_cp_dispatch._text import RANKS_HEADER, count, table, table_of_ranks
from jax_cp_dispatch.masks import StaticMask
from jax_cp_dispatch.metadata.describe import describe_traffic, rows_moved
from jax_cp_dispatch.planner.planned_pieces import Home, PlannedPieces
from jax_cp_dispatch.planner.seen_rows import SeenRows

_NUM_RANKS = 3
_NUM_PIECES = 2


class Rows(NamedTuple):
    """Rows of queries or keys between ranks, and the capacity of the buffers that receive them."""

    sent: Int[np.ndarray, "W W"]
    capacity: int


class PlanToDescribe(NamedTuple):
    """A plan of all ranks, as far as its description needs it.

    Attributes:
      name: of the class.
      pieces: what each rank computes.
      traffic: "keys", and "queries" if they move.
      num_tokens: of a rank.
      mask: which keys a query sees; of a mask with arrays, what the rows of this plan see.
      home: the order of the batch; None if the plan does not know it, or not what it sees there.
      speeds: relative speeds of the ranks, which determine their shares of the work.
      ranks_per_node: consecutive ranks of a node, if keys between nodes are to be counted.
    """

    name: str
    pieces: PlannedPieces
    traffic: Mapping[str, Rows]
    num_tokens: int
    mask: StaticMask | SeenRows
    home: Home | None
    speeds: Sequence[float] | None = None
    ranks_per_node: int | None = None


def describe_plan(plan: PlanToDescribe) -> str:
    """Returns the text of the `describe` methods."""
    name, planned, traffic, num_tokens, mask, home, speeds, ranks_per_node = plan
    keys = traffic["keys"].sent
    num_ranks = len(keys)
    computed = planned.per_rank(planned.end - planned.start, num_ranks)
    all_tokens = num_ranks * num_tokens
    after = _load(planned, mask, num_ranks, speeds)
    at_home = None if home is None else home.pieces(planned)
    before = None if at_home is None else _load(at_home, mask, num_ranks, speeds)
    work = f"{planned.pairs(mask).sum():.3e} query-key pairs; max/mean {after.max():.3f}"
    if speeds is not None:
        work += " relative to the ranks' speeds"
    if before is not None:
        work += f" (before planning {before.max():.3f}, on rank {before.argmax()})"
    lines = [
        f"{name}: {num_ranks} ranks of {count(num_tokens)} tokens",
        _line("work", work),
        _line(
            "tokens",
            f"{count(computed.sum())} queries, {count(all_tokens - computed.sum())} padding",
        ),
    ]
    values = {"queries computed": computed}
    for what, (sent, _) in traffic.items():
        away, own = rows_moved(sent), np.diag(sent)
        share = away / max(all_tokens, 1)
        lines.append(_line(what, f"{count(away)} move ({share:.3f} per token)"))
        values[f"{what} sent to others"] = sent.sum(1) - own
        values[f"{what} received from others"] = sent.sum(0) - own
    if ranks_per_node is not None:
        node = np.arange(num_ranks) // ranks_per_node
        away = int(keys[node[:, None] != node].sum())
        share = away / max(all_tokens, 1)
        text = f"{count(away)} keys move between nodes of {ranks_per_node} ranks"
        lines.append(_line("nodes", f"{text} ({share:.3f} per token)"))
    for what, (sent, size) in traffic.items():
        need = sent.sum(0)
        used = f"at most {count(need.max())} rows of {what} on rank {need.argmax()}"
        lines.append(_line("capacity", f"{used}; {need.max() / size:.0%} of {count(size)}"))
    share, part = ("the mean", "mean") if speeds is None else ("its share", "share")
    loads = {f"work / {part}": after}
    if before is not None:
        loads = {f"work / {part} before planning": before, f"work / {part} as planned": after}
    lines += ["", table(RANKS_HEADER, table_of_ranks(loads, digits=3) + table_of_ranks(values))]
    for what, (sent, _) in traffic.items():
        lines += ["", describe_traffic(what, sent)]
    if home is not None and at_home is not None and before is not None:
        lines += ["", "  Ranks with the most work before planning"]
        lines += _heaviest(at_home, before, mask, share, home, queries_move=False)
    lines += ["", "  Ranks with the most work as planned"]
    lines += _heaviest(planned, after, mask, share, home, queries_move="queries" in traffic)
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"  {name:<9} {text}"


def _load(
    planned: PlannedPieces,
    mask: StaticMask | SeenRows,
    num_ranks: int,
    speeds: Sequence[float] | None,
) -> Float64[np.ndarray, " W"]:
    """Returns the work of each rank, divided by its share of all work; 1 if there is none."""
    pairs = planned.per_rank(planned.pairs(mask), num_ranks).astype(float)
    shares = np.ones(num_ranks) if speeds is None else np.array(speeds)
    shares = pairs.sum() * shares / shares.sum()
    return pairs / shares if pairs.any() else np.ones(num_ranks)


def _heaviest(
    planned: PlannedPieces,
    load: Float64[np.ndarray, " W"],
    mask: StaticMask | SeenRows,
    share: str,
    home: Home | None,
    *,
    queries_move: bool,
) -> list[str]:
    """Names the ranks with the most work, and the documents that cause most of it."""
    pairs, keys = planned.pairs(mask), planned.keys(mask)
    lines = []
    for rank in np.argsort(-load, kind="stable")[:_NUM_RANKS].tolist():
        here = np.flatnonzero(planned.rank == rank)
        num = len(here)
        pieces = "1 piece of a document" if num == 1 else f"{count(num)} pieces of documents"
        lines.append(f"    rank {rank}: {load[rank]:.3f} times {share}, in {pieces}")
        total = max(pairs[here].sum(), 1)
        for at in here[np.argsort(-pairs[here], kind="stable")][:_NUM_PIECES].tolist():
            first, start, end, length = (int(x[at]) for x in planned.in_batch)
            lines.append(
                f"      {pairs[at] / total:4.0%}: {count(end - start)} queries attend to "
                f"{count(int(keys[at]))} keys of a document of {count(length)} tokens"
            )
            if home is not None:
                place = f"            in {home.place_of(first, length)}"
                sender = f"; {_sender(home, rank, first, start, end)}" if queries_move else ""
                lines.append(place + sender)
    return lines


def _sender(home: Home, rank: int, first: int, start: int, end: int) -> str:
    """Says which ranks hold the tokens [start, end) of a document."""
    one, last = home.holders(first, start, end)
    if one == last:
        return "at home" if one == rank else f"from rank {one}"
    return f"from ranks {one} to {last}"


def exceeded_capacities(
    names: tuple[str, ...], needs: Int32[Any, "W C"], sizes: tuple[int, ...]
) -> str:
    """Returns in words which sizes the largest needs exceed."""
    values = zip(names, np.asarray(needs).max(0).tolist(), sizes, strict=True)
    texts = [f"{name} {size}: it needs {need}" for name, need, size in values if need > size]
    return "; ".join(texts) or "a constraint of its config"
