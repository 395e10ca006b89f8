"""Counts query-key pairs: of documents, and between the ranks that hold them.

The one count of the planner, of FLOPs and of costs. `csrc/planner/problem.h` is the same closed
form for the search of the planner.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Float64, Int, Int64

from jax_cp_dispatch.cost.attention import (
    Hardware,
    Pass,
    Rows,
    StepCost,
    Traffic,
    Workload,
    all_others,
    attention_seconds,
    spread,
    steps_around,
)
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.pairs import pairs_with_keys
from jax_cp_dispatch.masks.read import read_mask_of_numbers, read_mask_on_host

Tokens: TypeAlias = int | np.integer | Int[np.ndarray, "..."]

_ROWS_AT_ONCE = 512  # of blocks; bounds the memory for documents over thousands of ranks


def count_pairs(
    start: Tokens,
    end: Tokens,
    *,
    length: Tokens | None = None,
    mask: Mask | str | None = None,
) -> Int64[np.ndarray, "..."]:
    """Counts the query-key pairs of the queries [start, end) of a document.

    Args:
      start, end: positions in the document; integers, or arrays of them for several documents.
      length: tokens of the document; None for `end`, which is sufficient for a causal mask.
      mask: see `context_parallel_attention`; None is causal.
    Returns:
      The pairs that the mask admits, as int64.
    Raises:
      TypeError: `mask` is not a mask.
    """
    mask = read_mask_of_numbers("count_pairs", mask)
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    length = end if length is None else np.asarray(length, np.int64)
    return mask.pairs(start, end, length)


def wasted_pairs(
    start: Tokens, end: Tokens, length: Tokens, mask: StaticMask, tile: tuple[int, int]
) -> Int64[np.ndarray, "..."]:
    """Counts the pairs outside the mask that tiles of the queries [start, end) compute.

    An average over the places of the tiles: half a tile of queries at the first and at the last
    query, half a tile of keys at both ends of a query's keys, and half a tile of queries along each
    diagonal edge of the mask. `tile` is (queries, keys).
    """
    queries, keys = (x - 1 for x in tile)
    start, end, length = (np.asarray(x, np.int64) for x in (start, end, length))

    def num_keys(query):
        first, last = mask.keys_of(query, query + 1, length)
        return last - first

    of_query = 2 * keys + mask.num_diagonals * queries
    waste = (queries * (num_keys(start) + num_keys(end - 1)) + (end - start) * of_query) // 2
    return np.where(start < end, waste, 0)


def rank_pairs(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    tokens_per_rank: int,
    zigzag: bool,
    mask: Mask | str | None = None,
) -> Float64[np.ndarray, "num_ranks num_ranks"]:
    """Counts the query-key pairs of each rank's queries (rows) with each rank's keys (columns).

    The sequence is cut into 2 * num_ranks blocks. Pairs of two blocks are differences, in both
    directions, of the pairs (q, k) with q < Q and k < K of a document, which have a closed form.

    Args:
      lengths: tokens of consecutive documents, from the start of the sequence.
      num_ranks: ranks over which the sequence is sharded.
      tokens_per_rank: tokens of one rank.
      zigzag: rank r holds blocks r and 2 * num_ranks - 1 - r, else blocks 2 * r and 2 * r + 1.
      mask: count the pairs that it admits; None is causal. Its arrays, if any, are NumPy's, of all
        columns, `[1, num_ranks * tokens_per_rank]`.
    Returns:
      Pairs, as float64.
    Raises:
      TypeError, ValueError: `mask` is not a mask, or its arrays have another shape.
    """
    mask = read_mask_on_host("rank_pairs", mask, (1, num_ranks * tokens_per_rank))
    cuts = np.arange(2 * num_ranks + 1) * tokens_per_rank // 2
    block = np.arange(2 * num_ranks)
    owner = np.minimum(block, 2 * num_ranks - 1 - block) if zigzag else block // 2
    if not isinstance(mask, StaticMask):
        return _pairs_of_arrays(lengths, cuts, owner, mask)
    pairs = np.zeros((num_ranks, num_ranks))
    sizes = np.array(lengths, np.int64)
    ends = sizes.cumsum()
    starts = ends - sizes
    first, last = np.searchsorted(cuts, starts, "right") - 1, np.searchsorted(cuts, ends)
    inside = last == first + 1  # documents in one block, usually most of them
    where = owner[first[inside]]
    np.add.at(pairs, (where, where), mask.pairs_before(sizes[inside], sizes[inside]))
    for i in np.flatnonzero((sizes > 0) & ~inside):
        ranks = owner[first[i] : last[i]]
        cut = np.clip(cuts[first[i] : last[i] + 1], starts[i], ends[i]) - starts[i]
        for part in range(0, len(ranks), _ROWS_AT_ONCE):
            rows = slice(part, min(part + _ROWS_AT_ONCE, len(ranks)))
            q = cut[rows.start : rows.stop + 1, None]
            counted = np.diff(np.diff(mask.pairs_before(q, cut[None]), axis=0), axis=1)
            np.add.at(pairs, (ranks[rows, None], ranks[None]), counted)
    return pairs


def equal_pairs(workload: Workload, hardware: Hardware) -> float:
    """Returns the pairs that decide the time of one computation, if all ranks do equal work."""
    of_ranks = pairs_of_ranks(workload)
    return of_ranks.sum() if hardware.has_shared_memory else of_ranks.mean()


def decisive_pairs(work: Float64[np.ndarray, " num_ranks"], hardware: Hardware) -> float:
    """Returns the pairs that decide the time of one computation, given those of each rank.

    These are the pairs of the slowest rank. If ranks share cores, all cores count, also idle ones.
    """
    if not hardware.has_shared_memory:
        return work.max()
    # Ranks share the cores evenly. When fewer ranks than cores are left, some cores are idle.
    left = np.maximum(np.arange(len(work), 0, -1), hardware.cores)
    return (np.diff(np.sort(work), prepend=0) * left).sum()


def pairs_of_ranks(workload: Workload) -> Float64[np.ndarray, " num_ranks"]:
    """Returns the pairs of each rank's queries, of tokens in packed order."""
    return pairs_between_ranks(workload, zigzag=False).sum(1)


@functools.lru_cache(maxsize=8)
def pairs_between_ranks(
    workload: Workload, *, zigzag: bool
) -> Float64[np.ndarray, "num_ranks num_ranks"]:
    """Counts as `rank_pairs`, for all batch rows."""
    sizes = {"num_ranks": workload.num_ranks, "tokens_per_rank": workload.tokens_per_rank}
    pairs = np.zeros((workload.num_ranks, workload.num_ranks))
    for b, row in enumerate(workload.rows):
        mask = jax.tree.map(lambda x, b=b: x[b : b + 1], workload.visible)
        pairs += rank_pairs(row, **sizes, mask=mask, zigzag=zigzag)
    return pairs


def _pairs_of_arrays(
    lengths: Sequence[int],
    cuts: Int64[np.ndarray, " num_cuts"],
    owner: Int64[np.ndarray, " num_blocks"],
    mask: Mask,
) -> Float64[np.ndarray, "num_ranks num_ranks"]:
    """`rank_pairs` of a mask with arrays, `[1, T]`; blocks end at `cuts`, and have an owner."""
    num_ranks = int(owner.max()) + 1
    pairs = np.zeros((num_ranks, num_ranks))
    used = sum(lengths)
    ends = np.repeat(np.cumsum(lengths, dtype=np.int64), lengths)
    starts = ends - np.repeat(lengths, lengths)
    mask = jax.tree.map(lambda x: x[:, :used], mask)
    ranges = mask.ranges(np.arange(used)[None], starts[None], ends[None])
    holder = np.repeat(owner, np.diff(cuts))
    for (first, last), rank in zip(itertools.pairwise(cuts.tolist()), owner, strict=True):
        last = min(last, used)
        if first >= last:
            continue
        seeing = slice(int(starts[first]), int(ends[last - 1]))  # the documents of these keys
        shifted = (x if x is None else x[:, seeing] - seeing.start for x in ranges)
        keys = pairs_with_keys(MaskRanges(*shifted), first - seeing.start, last - seeing.start)
        pairs[:, rank] += np.bincount(holder[seeing], keys[0], num_ranks)
    return pairs


# ---- The steps of algorithms that follow a plan: what they send in each pass, and compute.


class Moves(NamedTuple):
    """Rows that each rank sends to others, by a plan.

    Each is a number (for a plan, `num_q_tokens_moved` and `num_kv_tokens_moved`, divided by its
    ranks), spread equally over all other ranks; or `Traffic` by the kind of link, see
    `rows_by_link`.

    Attributes:
      queries: of queries; none of a placement.
      keys: of keys.
      pairs: query-key pairs of each rank, `Plan.pairs`; None: the same for all.
    """

    queries: Rows
    keys: Rows
    pairs: Any = None


def planned_steps(of: Pass) -> list[StepCost]:
    """Predicts the exchange before attention, attention, and the exchange after it.

    They are those of the slowest rank, if the pairs and rows of each are known; else work is equal,
    and the busiest rank exchanges longest. A plan that moves no queries has one exchange: before
    attention in the forward pass, else after it.
    """
    return _slowest(of)[0]


def planned_pairs(of: Pass) -> float:
    """Returns the pairs of the slowest rank of a plan, see `planned_steps`."""
    return _slowest(of)[1]


def _slowest(of: Pass) -> tuple[list[StepCost], float]:
    workload, hardware, backward, moves = of
    n, own = workload.num_ranks, workload.rows_per_rank
    queries, keys = (spread(rows, n, hardware) for rows in (moves.queries, moves.keys))
    is_known = moves.pairs is not None and keys.of_ranks is not None
    shares_cores = hardware.has_shared_memory
    known = moves.pairs if is_known and not shares_cores else equal_pairs(workload, hardware)
    pairs = np.asarray(known, float)
    computes = attention_seconds(
        of,
        pairs,
        q_rows=float(queries.capacity or own),
        kv_rows=float(keys.capacity or own + keys.total),
        is_planned=True,
    )
    own_before = own_after = 0.0
    kv_size = 4 if backward else None  # gradients return in float32
    if hardware.has_shared_memory:  # rows that stay are copied, too; all keys stay
        q = workload.q_bytes(max(0.0, own - queries.total)) if queries.total else 0.0
        kv = workload.kv_bytes(own, itemsize=kv_size)
        own_before, own_after = (q, q + kv) if backward else (q + kv, q)
    # Forward, queries, keys and values are sent, and the outputs of queries return. Backward, dout
    # is sent; dq, dk and dv return.
    of_queries = queries.times(workload.q_bytes(1))
    of_both = of_queries.plus(keys.times(workload.kv_bytes(1, itemsize=kv_size)))
    before, after = (of_queries, of_both) if backward else (of_both, of_queries)
    others = all_others(n, hardware)

    def steps_of(compute: Any, of_rank: Callable[[Traffic], Traffic] = lambda x: x):
        exchanges = (of_rank(before), own_before), (of_rank(after), own_after)
        return steps_around(of, float(compute), *exchanges, others)

    if pairs.ndim == 0:
        steps, decisive = steps_of(computes), pairs
    else:
        alone = lambda rank: lambda traffic: traffic.of_rank(rank)._replace(of_ranks=None)
        of_ranks = [steps_of(x, alone(rank)) for rank, x in enumerate(computes)]
        total = lambda steps: sum(max(x.compute, x.communication) for x in steps)
        slowest = max(range(n), key=lambda rank: total(of_ranks[rank]))
        steps = [
            step._replace(communication=x.communication)
            for step, x in zip(steps_of(computes[slowest]), of_ranks[slowest], strict=True)
        ]
        decisive = pairs[slowest]
    return steps[not before.total : len(steps) - (not after.total)], float(decisive)


def estimated_moves(workload: Workload) -> Moves:
    """Estimates the rows of queries and of keys per rank that a balanced plan moves.

    (For six packed batches on "h100", the predicted times were within 5 % of those from the mean
    numbers of the plan.)

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
