"""Predicts the steps of each algorithm: what is computed, and what is sent meanwhile."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from jax_cp_dispatch.cost.hardware import Hardware
from jax_cp_dispatch.cost.planned import Moves, bytes_sent, held_rows, moves_of
from jax_cp_dispatch.cost.rank_pairs import decisive_pairs
from jax_cp_dispatch.cost.traffic import Rows, exchange_seconds, rotating_traffic, spread
from jax_cp_dispatch.cost.ulysses import bytes_exchanged, can_share_heads, kv_copies
from jax_cp_dispatch.cost.work import Workload, attention_flops

ALGORITHMS = (
    *("ring", "zigzag", "hamilton", "hamilton_nodes", "ulysses", "balanced", "placed"),
    "all_gather",
)
"""Algorithms that `predict` covers, simplest first, so that `min` prefers the simplest on a tie."""


class StepCost(NamedTuple):
    """One step: its computation, and the communication during it."""

    compute: float  # seconds, of the slowest rank
    communication: float  # seconds
    sent_bytes: float  # by each rank, on average
    between_bytes: float = 0.0  # those of them that go to other nodes
    most_inside: float = 0.0  # bytes that the busiest rank sends or receives inside its node
    most_between: float = 0.0  # and between nodes


def step_costs(
    algorithm: str,
    workload: Workload,
    *,
    hardware: Hardware,
    backward: bool = False,
    moved_tokens: tuple[Rows, Rows] | None = None,
    placed_tokens: Rows | None = None,
) -> list[StepCost]:
    """Predicts the steps of one algorithm.

    - "ring": n computations; during all but the last, keys and values move to the next rank.
      Contiguous placement.
    - "zigzag": as "ring"; if causal, rank r holds blocks r and 2n-1-r of 2n.
    - "hamilton": the bytes of a ring in n-1 chunks, one to every other rank; if causal, placement
      and computations are those of "zigzag". (The cycles determine which chunks are present in a
      step. With packed documents, the computations differed by less than 8 % for n = 8, and by up
      to 25 % for n = 16.)
    - "hamilton_nodes": m chunks for nodes of m ranks, one of which goes to the next node. For one
      node, the same as "hamilton".
    - "ulysses": queries, keys and values are exchanged by heads, each rank computes an equal share
      of the heads, and the output is exchanged back.
    - "balanced": queries, keys and values are sent, all ranks do equal work, and the output
      returns.
    - "placed": keys and values are sent, and all ranks do equal work.
    - "all_gather": all keys and values are gathered first; if causal, placed as in "zigzag".

    A computation takes its FLOPs divided by the rate of attention. On "shared_memory", the time to
    copy its operands and results at `link_bandwidth` is added.

    Args:
      algorithm: one of `ALGORITHMS`.
      workload: shapes and documents.
      hardware: rates of ranks and links.
      backward: predict the backward pass alone, with 5/2 of the FLOPs. The gradients of keys and
        values also move, n times, in float32, each during the computation after the one that
        produces it.
      moved_tokens: for "balanced", the rows of queries and of keys that each rank sends: numbers
        (a plan's `num_q_tokens_moved` and `num_kv_tokens_moved`, divided by its ranks), which are
        spread equally over all other ranks; or `Traffic` by the kind of link, see `rows_by_link`.
        None: an estimate.
      placed_tokens: for "placed", the rows of keys that each rank sends, in the same way
        (`num_kv_tokens_moved` of the plan of `place_tokens`). "placed" needs it.
    Returns:
      The steps. On "shared_memory", where nothing can be hidden, computation and communication
      alternate.
    Raises:
      ValueError: the algorithm is unknown, the ranks cannot be divided into nodes, or, for
        "ulysses", do not divide the query heads.
    References:
      Ring: arXiv:2310.01889. Hamilton: arXiv:2509.26541. Ulysses: arXiv:2309.14509. All-gather:
      arXiv:2407.21783, 3.3.2.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"step_costs: algorithm is {algorithm!r}; it needs to be one of "
            f"{', '.join(map(repr, ALGORITHMS))}."
        )
    if algorithm in ("balanced", "placed"):
        moves = moves_of(algorithm, workload, hardware, moved_tokens, placed_tokens)
        steps = _planned(algorithm, workload, hardware, moves, backward)
        if algorithm == "placed":  # keys arrive before attention; their gradients return after it
            steps = steps[1:] if backward else steps[:-1]
    elif algorithm == "ulysses":
        steps = _ulysses(workload, hardware, backward)
    else:
        steps = _rotating(algorithm, workload, hardware, backward)
    if hardware.topology != "shared_memory":
        return steps
    alone = [(StepCost(x.compute, 0.0, 0.0), x._replace(compute=0.0)) for x in steps]
    return [step for pair in alone for step in pair]


def _planned(
    algorithm: str, workload: Workload, hardware: Hardware, moves: Moves, backward: bool
) -> list[StepCost]:
    n = workload.num_ranks
    before, after = bytes_sent(moves, workload, backward=backward)
    (compute,) = _attention_seconds(algorithm, workload, hardware, backward)
    q_rows, kv_rows = held_rows(moves, workload)
    compute += _copy_seconds(workload, hardware, q_rows, kv_rows, backward)
    compute += _expand_seconds(workload, hardware, kv_rows, backward)
    step = lambda x, sent, own: StepCost(
        x,
        exchange_seconds("balanced", sent, n, hardware, own),
        *(sent.total, sent.between, sent.most_inside, sent.most_between),
    )
    own_before = own_after = 0.0
    if hardware.topology == "shared_memory":  # rows that stay are copied, too; all keys stay
        own, moved = workload.rows_per_rank, moves.queries.total
        q = workload.q_bytes(max(0.0, own - moved)) if moved else 0.0
        kv = workload.kv_bytes(own, itemsize=4 if backward else None)
        own_before, own_after = (q, q + kv) if backward else (q + kv, q)
    return [
        step(0.0, before, own_before),
        StepCost(compute, 0.0, 0.0),
        step(0.0, after, own_after),
    ]


def _ulysses(workload: Workload, hardware: Hardware, backward: bool) -> list[StepCost]:
    n, rows = workload.num_ranks, workload.rows_per_rank
    if not can_share_heads(workload):
        raise ValueError(
            f"step_costs: 'ulysses' shares {workload.num_heads} heads over {n} ranks, which must "
            "divide them. Use another algorithm, or fewer ranks."
        )
    (compute,) = _attention_seconds("ulysses", workload, hardware, backward)
    compute += _copy_seconds(workload, hardware, rows, kv_copies(workload) * rows, backward)

    def exchange(num_bytes: float) -> StepCost:
        sent = spread(num_bytes * (n - 1) / n, n, hardware)
        seconds = exchange_seconds("ulysses", sent, n, hardware, num_bytes / n)
        return StepCost(
            0.0, seconds, *(sent.total, sent.between, sent.most_inside, sent.most_between)
        )

    before, after = map(exchange, bytes_exchanged(workload, backward=backward))
    return [before, StepCost(compute, 0.0, 0.0), after]


def _rotating(
    algorithm: str, workload: Workload, hardware: Hardware, backward: bool
) -> list[StepCost]:
    n, others = workload.num_ranks, workload.num_ranks - 1
    kv = workload.kv_bytes(workload.rows_per_rank)
    dkv = workload.kv_bytes(workload.rows_per_rank, itemsize=4)
    compute = _attention_seconds(algorithm, workload, hardware, backward)
    rows = workload.rows_per_rank
    keys = rows * n // len(compute)  # of a computation
    compute += _copy_seconds(workload, hardware, rows, keys, backward)
    compute += _expand_seconds(workload, hardware, keys, backward)
    if algorithm == "all_gather":
        sent = [others * kv, 0, others * dkv * backward]
        compute = np.array([0.0, *compute, 0.0])
    elif backward and others:
        sent = [kv, *[kv + dkv] * (others - 1), dkv, dkv]
        compute = np.array([*compute, 0.0])
    else:
        sent = [kv] * others + [0]
    traffic = [rotating_traffic(algorithm, x, n, hardware) for x in sent]
    return [
        StepCost(
            float(x),
            exchange_seconds(algorithm, y, n, hardware),
            *(y.total, y.between, y.most_inside, y.most_between),
        )
        for x, y in zip(compute, traffic, strict=True)
    ]


def _attention_seconds(
    algorithm: str, workload: Workload, hardware: Hardware, backward: bool
) -> Float64[np.ndarray, " num_computations"]:
    """Returns the seconds of the FLOPs of each computation."""
    sizes = {"num_heads": workload.num_heads, "head_size": workload.head_size}
    # Repeated KV heads share no products: on 8 virtual devices, "ulysses" with four copies took 1.2
    # of the time of "placed", and without copies 0.9.
    is_slow = algorithm == "ulysses" and kv_copies(workload) > 1
    rate = hardware.attention_rate(is_planned=is_slow or algorithm in ("balanced", "placed"))
    pair_seconds = attention_flops(1, **sizes, backward=backward) / rate
    return decisive_pairs(algorithm, workload, hardware) * pair_seconds


def _expand_seconds(
    workload: Workload, hardware: Hardware, rows: int | float, backward: bool
) -> float:
    """Returns the seconds to expand latent rows; backward, again, and both its transposes."""
    products = 3 if backward else 1
    return rows * workload.expand_flops * products / hardware.matmul_flops


def _copy_seconds(
    workload: Workload,
    hardware: Hardware,
    q_rows: int | float,
    kv_rows: int | float,
    backward: bool,
) -> float:
    """Returns the seconds to copy the operands and results of one computation, on all ranks.

    Forward, q and the output, k and v. Backward, q, dout, the output and dq; k, v, and their
    gradients in float32. Elsewhere than on "shared_memory", attention hides this.
    """
    if hardware.topology != "shared_memory":
        return 0.0
    num_bytes = (4 if backward else 2) * workload.q_bytes(q_rows) + workload.kv_bytes(kv_rows)
    if backward:
        num_bytes += workload.kv_bytes(kv_rows, itemsize=4)
    return workload.num_ranks * num_bytes / hardware.link_bandwidth
