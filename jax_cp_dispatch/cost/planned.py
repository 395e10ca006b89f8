"""What the algorithms that follow a plan send in each pass, and the rows that a rank holds."""

from typing import NamedTuple

import numpy as np

from jax_cp_dispatch.cost.hardware import Hardware
from jax_cp_dispatch.cost.rank_pairs import pairs_of_ranks
from jax_cp_dispatch.cost.traffic import Rows, Traffic, spread
from jax_cp_dispatch.cost.work import Workload


class Moves(NamedTuple):
    """Rows that each rank sends to others: of queries, and of keys."""

    queries: Traffic
    keys: Traffic


def moves_of(
    algorithm: str,
    workload: Workload,
    hardware: Hardware,
    moved_tokens: tuple[Rows, Rows] | None,
    placed_tokens: Rows | None,
) -> Moves:
    """Returns the moves of "balanced" or "placed"."""
    n = workload.num_ranks
    if algorithm == "balanced":
        q, kv = moved_tokens or _estimated(workload)
        return Moves(spread(q, n, hardware), spread(kv, n, hardware))
    if placed_tokens is None:
        raise ValueError(
            "step_costs: 'placed' needs placed_tokens, the rows of keys that each rank sends. Pass "
            "num_kv_tokens_moved of the plan of place_tokens, divided by the ranks."
        )
    return Moves(spread(0, n, hardware), spread(placed_tokens, n, hardware))


def bytes_sent(moves: Moves, workload: Workload, *, backward: bool) -> list[Traffic]:
    """Returns the bytes sent before and after attention.

    Forward, queries, keys and values are sent, and the outputs of queries return. Backward, dout is
    sent; dq, and dk and dv in float32, return.
    """
    q = moves.queries.times(workload.q_bytes(1))
    if backward:
        return [q, q.plus(moves.keys.times(workload.kv_bytes(1, itemsize=4)))]
    return [q.plus(moves.keys.times(workload.kv_bytes(1))), q]


def held_rows(moves: Moves, workload: Workload) -> tuple[float, float]:
    """Returns the rows of queries and of keys in the buffers of a rank."""
    own = workload.rows_per_rank
    queries, keys = moves.queries.capacity, moves.keys.capacity
    return float(queries or own), float(keys or own + moves.keys.total)


def _estimated(workload: Workload) -> tuple[float, float]:
    """Estimates the rows of queries and of keys per rank that a balanced plan moves.

    (For six packed batches on "h100", the predicted times were within 9 % of those from the plan's
    own numbers.)

    Queries: at most the share of each rank's work above the mean. Keys: the part of a rank's first
    document that precedes it on other ranks; and a document with s > 1 equal shares of all work
    goes to s ranks.
    """
    n, tokens = workload.num_ranks, workload.tokens_per_rank
    work = pairs_of_ranks(workload)
    q = np.maximum(0, 1 - work.mean() / np.maximum(work, 1)).mean() * workload.rows_per_rank
    kv = 0.0
    for row in workload.rows:
        lengths = np.array(row, float)
        starts = np.concatenate([[0], lengths.cumsum()])
        cuts = np.arange(n) * tokens
        seen = workload.visible.num_keys(n * tokens)
        kv += np.minimum(cuts - starts[np.searchsorted(starts, cuts, "right") - 1], seen).sum()
        reach = np.minimum(lengths, seen)
        shares = lengths * reach / (2 if workload.visible.is_causal else 1) / max(work.mean(), 1)
        kv += (reach * shares)[shares > 1].sum()
    return float(q), float(min(kv / n, (n - 1) * workload.rows_per_rank))
