"""The steps of algorithms that follow a plan: what they send in each pass, and compute."""

from typing import NamedTuple

import numpy as np

from jax_cp_dispatch.cost.hardware import Hardware
from jax_cp_dispatch.cost.pairs import equal_pairs, pairs_of_ranks
from jax_cp_dispatch.cost.steps import StepCost, attention_seconds, step_cost
from jax_cp_dispatch.cost.traffic import Rows, Traffic, all_others, spread
from jax_cp_dispatch.cost.work import Workload


class Moves(NamedTuple):
    """Rows that each rank sends to others, by a plan.

    Each is a number (for a plan, `num_q_tokens_moved` and `num_kv_tokens_moved`, divided by its
    ranks), spread equally over all other ranks; or `Traffic` by the kind of link, see
    `rows_by_link`.

    Attributes:
      queries: of queries; none of a placement.
      keys: of keys.
    """

    queries: Rows
    keys: Rows


def planned_steps(
    moves: Moves, workload: Workload, hardware: Hardware, *, backward: bool
) -> list[StepCost]:
    """Predicts the exchange before attention, attention of equal work, and the exchange after."""
    n, own = workload.num_ranks, workload.rows_per_rank
    queries, keys = (spread(rows, n, hardware) for rows in moves)
    compute = attention_seconds(
        equal_pairs(workload, hardware),
        *(workload, hardware),
        q_rows=float(queries.capacity or own),
        kv_rows=float(keys.capacity or own + keys.total),
        backward=backward,
        is_planned=True,
    )
    own_before = own_after = 0.0
    if hardware.topology == "shared_memory":  # rows that stay are copied, too; all keys stay
        q = workload.q_bytes(max(0.0, own - queries.total)) if queries.total else 0.0
        kv = workload.kv_bytes(own, itemsize=4 if backward else None)
        own_before, own_after = (q, q + kv) if backward else (q + kv, q)
    before, after = _bytes_sent(queries, keys, workload, backward=backward)
    options = all_others(n, hardware), workload, hardware
    return [
        step_cost(0.0, before, *options, own_before),
        StepCost(compute, 0.0, 0.0),
        step_cost(0.0, after, *options, own_after),
    ]


def _bytes_sent(
    queries: Traffic, keys: Traffic, workload: Workload, *, backward: bool
) -> list[Traffic]:
    """Returns the bytes sent before and after attention.

    Forward, queries, keys and values are sent, and the outputs of queries return. Backward, dout is
    sent; dq, and dk and dv in float32, return.
    """
    q = queries.times(workload.q_bytes(1))
    if backward:
        return [q, q.plus(keys.times(workload.kv_bytes(1, itemsize=4)))]
    return [q.plus(keys.times(workload.kv_bytes(1))), q]


def estimated_moves(workload: Workload) -> Moves:
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
    return Moves(float(q), float(min(kv / n, (n - 1) * workload.rows_per_rank)))
