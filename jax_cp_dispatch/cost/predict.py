"""Predicts the step times of each algorithm, and their sums."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jax_cp_dispatch.cost.hardware import Hardware
from jax_cp_dispatch.cost.work import Workload, attention_flops, rank_pairs

ALGORITHMS = ("ring", "zigzag", "hamilton", "hamilton_nodes", "balanced", "placed", "all_gather")
"""Algorithms that `predict` covers, simplest first, so that `min` prefers the simplest on a tie."""


# How often "shared_memory" copies a row of an exchange that fills new buffers, as measured.
_COPIES = 6


class StepCost(NamedTuple):
    """One step: its computation, and the communication during it."""

    compute: float  # seconds, of the slowest rank
    communication: float  # seconds
    sent_bytes: float  # by each rank


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Sums over the steps of an algorithm, in seconds.

    Attributes:
      total: Σ max(compute, communication).
      compute: Σ compute, of the slowest rank of each step.
      communication: Σ communication, hidden or not.
      exposed_communication: Σ max(0, communication - compute) = total - compute.
      imbalance: `compute` divided by its value for equal work on all ranks in all steps.
      bytes_per_rank: bytes that each rank sends.
    """

    total: float
    compute: float
    communication: float
    exposed_communication: float
    imbalance: float
    bytes_per_rank: float


def predict(
    workload: Workload,
    *,
    hardware: Hardware,
    with_backward: bool = False,
    moved_tokens: tuple[int | float, int | float] | None = None,
    placed_tokens: int | float | None = None,
) -> dict[str, Prediction]:
    """Predicts the time of every algorithm; call on the host.

    Args:
      workload: shapes and documents.
      hardware: rates of ranks and links.
      with_backward: predict forward and backward pass together, instead of the forward pass.
      moved_tokens, placed_tokens: see `step_costs`.
    Returns:
      A prediction for each of `ALGORITHMS`; "hamilton_nodes" only for several nodes, and "placed"
      only with `placed_tokens`.
    Raises:
      ValueError: the ranks do not fill the nodes.
    """
    passes = (False, True) if with_backward else (False,)
    options = {
        "hardware": hardware,
        "moved_tokens": moved_tokens,
        "placed_tokens": placed_tokens,
    }
    sums = {}
    for algorithm in ALGORITHMS:
        if algorithm == "placed" and placed_tokens is None:
            continue
        costs = [step_costs(algorithm, workload, backward=x, **options) for x in passes]
        steps = list(itertools.chain(*costs))
        sums[algorithm] = (
            sum(max(x.compute, x.communication) for x in steps),
            *map(sum, zip(*steps, strict=True)),
        )
    equal = sums["balanced"][1]
    if hardware.node_size(workload.num_ranks) == workload.num_ranks:
        del sums["hamilton_nodes"]
    return {
        algorithm: Prediction(
            total=total,
            compute=compute,
            communication=communication,
            exposed_communication=total - compute,
            imbalance=compute / equal if equal else 1.0,
            bytes_per_rank=sent_bytes,
        )
        for algorithm, (total, compute, communication, sent_bytes) in sums.items()
    }


def step_costs(
    algorithm: str,
    workload: Workload,
    *,
    hardware: Hardware,
    backward: bool = False,
    moved_tokens: tuple[int | float, int | float] | None = None,
    placed_tokens: int | float | None = None,
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

    Args:
      algorithm: one of `ALGORITHMS`.
      workload: shapes and documents.
      hardware: rates of ranks and links.
      backward: predict the backward pass alone, with 5/2 of the FLOPs. The gradients of keys and
        values also move, n times, in float32, each during the computation after the one that
        produces it.
      moved_tokens: for "balanced", the rows of queries and of keys that each rank sends (a plan's
        `num_q_tokens_moved` and `num_kv_tokens_moved`, divided by its ranks). None: an estimate.
      placed_tokens: for "placed", the rows of keys that each rank sends (`num_kv_tokens_moved` of
        the plan of `place_tokens`, divided by its ranks). "placed" needs it.
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
    compute = _compute_seconds(algorithm, workload, hardware, backward)
    shared = hardware.topology == "shared_memory"
    if algorithm == "balanced":
        sent = _balanced_bytes(workload, moved_tokens, backward, copies_all=shared)
        compute = np.array([0.0, *compute, 0.0])
    elif algorithm == "placed":
        sent = [0.0, _placed_bytes(workload, placed_tokens, backward, copies_all=shared)]
        compute = np.array([*compute, 0.0])
        if not backward:  # keys arrive before attention; their gradients return after it
            sent, compute = sent[::-1], compute[::-1]
    else:
        others = workload.num_ranks - 1
        kv = workload.kv_bytes(workload.rows_per_rank)
        dkv = workload.kv_bytes(workload.rows_per_rank, itemsize=4)
        if algorithm == "all_gather":
            sent = [others * kv, 0, others * dkv * backward]
            compute = np.array([0.0, *compute, 0.0])
        elif backward and others:
            sent = [kv, *[kv + dkv] * (others - 1), dkv, dkv]
            compute = np.array([*compute, 0.0])
        else:
            sent = [kv] * others + [0]
    steps = [
        StepCost(float(x), _exchange_seconds(algorithm, y, workload, hardware), float(y))
        for x, y in zip(compute, sent, strict=True)
    ]
    if hardware.topology != "shared_memory":
        return steps
    return [y for x in steps for y in (StepCost(x.compute, 0.0, 0.0), x._replace(compute=0.0))]


@functools.lru_cache(maxsize=2)  # two layouts serve all algorithms
def _pairs(workload: Workload, *, zigzag: bool) -> Int64[np.ndarray, "num_ranks num_ranks"]:
    """Returns `rank_pairs` summed over all batch rows."""
    placed = {"causal": workload.causal, "window": workload.window, "zigzag": zigzag}
    sizes = {"num_ranks": workload.num_ranks, "tokens_per_rank": workload.tokens_per_rank}
    return np.stack([rank_pairs(row, **sizes, **placed) for row in workload.rows]).sum(0)


def _compute_seconds(
    algorithm: str, workload: Workload, hardware: Hardware, backward: bool
) -> Float64[np.ndarray, " num_computes"]:
    """Returns the seconds of each computation, of the slowest rank unless ranks share cores."""
    n, rank = workload.num_ranks, np.arange(workload.num_ranks)
    zigzag = workload.causal and algorithm != "ring"
    pairs = _pairs(workload, zigzag=zigzag)
    if algorithm in ("balanced", "placed"):
        work = np.full((1, n), pairs.sum() / n)
    elif algorithm == "all_gather":
        work = pairs.sum(1)[None]
    else:
        work = pairs[rank, (rank - rank[:, None]) % n]  # [step, rank]: keys of rank - step
    decisive = work.max(1)
    if hardware.topology == "shared_memory":
        # Ranks share the cores evenly. When fewer ranks than cores are left, some cores are idle.
        left = np.maximum(np.arange(n, 0, -1), hardware.cores)
        decisive = (np.diff(np.sort(work, axis=1), axis=1, prepend=0) * left).sum(1)
    flops_per_pair = attention_flops(
        1, num_heads=workload.num_heads, head_size=workload.head_size, backward=backward
    )
    return decisive * flops_per_pair / hardware.matmul_flops


def _exchange_seconds(
    algorithm: str, num_bytes: int | float, workload: Workload, hardware: Hardware
) -> float:
    """Returns the seconds in which each rank sends `num_bytes` as the algorithm does."""
    n, m = workload.num_ranks, hardware.node_size(workload.num_ranks)
    if not num_bytes or n == 1:  # a single rank sends nothing
        return 0.0
    if algorithm in ("ring", "zigzag"):  # the last rank of a node sends to the next node
        return max(
            hardware.exchange_seconds(num_bytes, num_ranks=n, inside=int(m > 1)),
            hardware.exchange_seconds(num_bytes, num_ranks=n, outside=int(m < n)),
        )
    if algorithm == "hamilton_nodes" and m < n:
        num_chunks = m - (m in (3, 5))  # see `two_level_maps`
        inside, outside = num_chunks - 1, 1
    else:  # something to every other rank
        num_chunks, inside, outside = n - 1, m - 1, n - m
    return hardware.exchange_seconds(
        num_bytes / num_chunks, num_ranks=n, inside=inside, outside=outside, senders=m
    )


def _balanced_bytes(
    workload: Workload,
    moved_tokens: tuple[int | float, int | float] | None,
    backward: bool,
    *,
    copies_all: bool,
) -> list[int | float]:
    """Returns the bytes that each rank sends before, during and after attention of a balanced plan.

    With `copies_all`, rows that stay count too, and six times: all rows are copied to windows, and
    from there into blocks, in memory that is new for every call. (This matches measurements. Other
    algorithms keep only blocks of local tokens.)
    """
    q, kv = moved_tokens or _estimated_moves(workload)
    times = 1
    if copies_all:
        q, kv, times = q + workload.rows_per_rank, kv + workload.rows_per_rank, _COPIES
    q_bytes, kv_bytes = times * workload.q_bytes(q), times * workload.kv_bytes(kv)
    if backward:  # dO is sent; dQ, and dK and dV in float32, return
        return [q_bytes, 0.0, q_bytes + times * workload.kv_bytes(kv, itemsize=4)]
    return [q_bytes + kv_bytes, 0.0, q_bytes]


def _placed_bytes(
    workload: Workload, kv: int | float | None, backward: bool, *, copies_all: bool
) -> int | float:
    """Returns the bytes that each rank sends in one pass; `copies_all` as in `_balanced_bytes`."""
    if kv is None:
        raise ValueError(
            "step_costs: 'placed' needs placed_tokens, the rows of keys that each rank sends. Pass "
            "num_kv_tokens_moved of the plan of place_tokens, divided by the ranks."
        )
    if copies_all:
        kv = _COPIES * (kv + workload.rows_per_rank)
    return workload.kv_bytes(kv, itemsize=4 if backward else None)


def _estimated_moves(workload: Workload) -> tuple[float, float]:
    """Estimates the rows of queries and of keys per rank that a balanced plan moves.

    (For six packed batches on "h100", the predicted times were within 9 % of those from the plan's
    own numbers.)

    Queries: at most the share of each rank's work above the mean. Keys: the part of a rank's first
    document that precedes it on other ranks; and a document with s > 1 equal shares of all work
    goes to s ranks.
    """
    n, tokens = workload.num_ranks, workload.tokens_per_rank
    work = _pairs(workload, zigzag=False).sum(1)
    q = np.maximum(0, 1 - work.mean() / np.maximum(work, 1)).mean() * workload.rows_per_rank
    kv = 0.0
    for row in workload.rows:
        lengths = np.array(row, float)
        starts = np.concatenate([[0], lengths.cumsum()])
        cuts = np.arange(n) * tokens
        seen = np.inf if workload.reach.num_keys is None else workload.reach.num_keys
        kv += np.minimum(cuts - starts[np.searchsorted(starts, cuts, "right") - 1], seen).sum()
        reach = np.minimum(lengths, seen)
        shares = lengths * reach / (2 if workload.causal else 1) / max(work.mean(), 1)
        kv += (reach * shares)[shares > 1].sum()
    return float(q), float(min(kv / n, (n - 1) * workload.rows_per_rank))
