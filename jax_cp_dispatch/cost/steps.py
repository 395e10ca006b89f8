"""Predicts the steps of each algorithm: what is computed, and what is sent meanwhile."""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from jax_cp_dispatch.cost.attention import Tile
from jax_cp_dispatch.cost.hardware import Hardware
from jax_cp_dispatch.cost.planned import (
    Moves,
    bytes_sent,
    held_rows,
    moves_of,
    wasted_pairs,
)
from jax_cp_dispatch.cost.traffic import Rows, exchange_seconds, rotating_traffic
from jax_cp_dispatch.cost.work import Workload, rank_pairs

ALGORITHMS = ("ring", "zigzag", "hamilton", "hamilton_nodes", "balanced", "placed", "all_gather")
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
    - "balanced": queries, keys and values are sent, all ranks do equal work, and the output
      returns.
    - "placed": keys and values are sent, and all ranks do equal work.
    - "all_gather": all keys and values are gathered first; if causal, placed as in "zigzag".

    A computation is that of attention, and the rewriting of rows into its layout at
    `Hardware.memory_bandwidth`: queries and outputs once; in each step, keys, values and
    blocks of queries.

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
      ValueError: the algorithm is unknown, or the ranks do not fill the nodes.
    References:
      Ring: arXiv:2310.01889. Hamilton: arXiv:2509.26541. All-gather: arXiv:2407.21783, 3.3.2.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"step_costs: algorithm is {algorithm!r}; it needs to be one of "
            f"{', '.join(map(repr, ALGORITHMS))}."
        )
    if algorithm in ("balanced", "placed"):
        work = _pairs(workload, False, (1, 1), _cores(hardware)).of_ranks
        moves = moves_of(algorithm, workload, hardware, work, moved_tokens, placed_tokens)
        steps = _planned(workload, hardware, moves, float(work.mean()), backward)
        if algorithm == "placed":  # keys arrive before attention; their gradients return after it
            steps = steps[1:] if backward else steps[:-1]
    else:
        steps = _rotating(algorithm, workload, hardware, backward)
    if hardware.topology != "shared_memory":
        return steps
    alone = [(StepCost(x.compute, 0.0, 0.0), x._replace(compute=0.0)) for x in steps]
    return [step for pair in alone for step in pair]


def _planned(
    workload: Workload, hardware: Hardware, moves: Moves, pairs: float, backward: bool
) -> list[StepCost]:
    n = workload.num_ranks
    before, after = bytes_sent(moves, workload, backward=backward)
    tile = _tile(workload, hardware, is_planned=True)
    pairs = pairs + (wasted_pairs(moves, workload, tile) if pairs else 0.0)
    shared = hardware.topology == "shared_memory"
    compute = pairs * (n if shared else 1) * _pair_seconds(workload, hardware, tile, backward)
    queries, keys = held_rows(moves, workload)
    compute += _copy_once_seconds(workload, hardware, queries, backward)
    compute += _copy_seconds(workload, hardware, keys, backward)
    step = lambda x, sent, own: StepCost(
        x,
        exchange_seconds("balanced", sent, n, hardware, own),
        *(sent.total, sent.between, sent.most_inside, sent.most_between),
    )
    own_before = own_after = 0.0
    if shared:  # rows that stay are copied, too; keys stay even if they are also sent
        own, moved = workload.rows_per_rank, moves.queries.total
        q = workload.q_bytes(max(0.0, own - moved)) if moved else 0.0
        kv = workload.kv_bytes(own, itemsize=4 if backward else None)
        own_before, own_after = (q, q + kv) if backward else (q + kv, q)
    return [
        step(0.0, before, own_before),
        StepCost(compute, 0.0, 0.0),
        step(0.0, after, own_after),
    ]


def _rotating(
    algorithm: str, workload: Workload, hardware: Hardware, backward: bool
) -> list[StepCost]:
    n, others = workload.num_ranks, workload.num_ranks - 1
    kv = workload.kv_bytes(workload.rows_per_rank)
    dkv = workload.kv_bytes(workload.rows_per_rank, itemsize=4)
    compute = _compute_seconds(algorithm, workload, hardware, backward)
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


def _compute_seconds(
    algorithm: str, workload: Workload, hardware: Hardware, backward: bool
) -> Float64[np.ndarray, " num_computes"]:
    """Returns the seconds of each computation, of the slowest rank unless ranks share cores."""
    n = workload.num_ranks
    zigzag = workload.causal and algorithm != "ring"
    tile = _tile(workload, hardware, is_planned=False)
    pairs = _pairs(workload, zigzag, (tile.queries, tile.keys), _cores(hardware))
    decisive = pairs.in_one_step if algorithm == "all_gather" else pairs.in_steps
    seconds = decisive * _pair_seconds(workload, hardware, tile, backward)
    keys = workload.rows_per_rank * n // len(seconds)  # of a step
    seconds += _copy_seconds(workload, hardware, keys, backward)
    seconds[0] += _copy_once_seconds(workload, hardware, workload.rows_per_rank, backward)
    return seconds


class _Pairs(NamedTuple):
    """Query-key pairs: those that decide the time of steps are of the slowest rank, or if ranks
    share cores, of all cores."""

    of_ranks: Float64[np.ndarray, " num_ranks"]
    in_steps: Float64[np.ndarray, " num_ranks"]  # of a ring
    in_one_step: Float64[np.ndarray, " 1"]


@functools.lru_cache(maxsize=8)
def _pairs(workload: Workload, zigzag: bool, tile: tuple[int, int], cores: int | None) -> _Pairs:
    """Counts the pairs of all batch rows; `cores` is the number that ranks share, or None."""
    n, rank = workload.num_ranks, np.arange(workload.num_ranks)
    placed = {"causal": workload.causal, "window": workload.window, "zigzag": zigzag}
    sizes = {"num_ranks": n, "tokens_per_rank": workload.tokens_per_rank}
    pairs = np.zeros((n, n))
    for row in workload.rows:
        pairs += rank_pairs(row, **sizes, **placed, tile=tile)
    of_ranks = pairs.sum(1)
    in_steps = np.array([_decisive(pairs[rank, rank - step], cores) for step in range(n)])
    return _Pairs(of_ranks, in_steps, np.array([_decisive(of_ranks, cores)]))


def _decisive(work: Float64[np.ndarray, " num_ranks"], cores: int | None) -> float:
    if cores is None:
        return work.max()
    # Ranks share the cores evenly. When fewer ranks than cores are left, some cores are idle.
    left = np.maximum(np.arange(len(work), 0, -1), cores)
    return (np.diff(np.sort(work), prepend=0) * left).sum()


def _cores(hardware: Hardware) -> int | None:
    return hardware.cores if hardware.topology == "shared_memory" else None


def _tile(workload: Workload, hardware: Hardware, *, is_planned: bool) -> Tile:
    heads = workload.num_heads // workload.num_kv_heads or 1
    return hardware.attention_rate.tile(heads_per_group=heads, is_planned=is_planned)


def _pair_seconds(workload: Workload, hardware: Hardware, tile: Tile, backward: bool) -> float:
    sizes = {"num_heads": workload.num_heads, "head_size": workload.head_size}
    return hardware.attention_rate.pair_seconds(tile, **sizes, backward=backward)


# How often rows are rewritten: once in a call, of queries, outputs and their gradients; and in each
# computation, of blocks of them, of keys and values, and of the gradients of these. The programs
# for CPU have more copies, but those of blocks stay in the caches.
_Q_ONCE, _Q_ONCE_BACKWARD = 6, 3
_Q_COPIES, _Q_COPIES_BACKWARD = 1, 4
_KV_COPIES, _DKV_COPIES = 1, 2


def _copy_once_seconds(
    workload: Workload, hardware: Hardware, q_rows: int | float, backward: bool
) -> float:
    """Returns the seconds to rewrite rows into the layout of attention, and results back."""
    copies = _Q_ONCE_BACKWARD if backward else _Q_ONCE
    return _rewrite_seconds(copies * workload.q_bytes(q_rows), workload, hardware)


def _copy_seconds(
    workload: Workload, hardware: Hardware, kv_rows: int | float, backward: bool
) -> float:
    """Returns the seconds to rewrite rows in a computation with `kv_rows` keys on each rank.

    Gradients of keys and values are in float32.
    """
    q_copies = _Q_COPIES_BACKWARD if backward else _Q_COPIES
    num_bytes = q_copies * workload.q_bytes(workload.rows_per_rank)
    num_bytes += _KV_COPIES * workload.kv_bytes(kv_rows)
    if backward:
        num_bytes += _DKV_COPIES * workload.kv_bytes(kv_rows, itemsize=4)
    return _rewrite_seconds(num_bytes, workload, hardware)


def _rewrite_seconds(num_bytes: int | float, workload: Workload, hardware: Hardware) -> float:
    shared = hardware.topology == "shared_memory"
    return num_bytes * (workload.num_ranks if shared else 1) / hardware.memory_bandwidth
