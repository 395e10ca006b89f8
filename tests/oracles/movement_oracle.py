"""NumPy oracle of movement: row by row, in Python loops, from the definition."""

from typing import Any

import numpy as np


def random_plan(rng, num_ranks, num_slots, num_tokens, num_replicas=1) -> dict[str, Any]:
    """Lengths, destinations and offsets as plain arrays: holes, empty slots, padding anywhere.

    Every rank's shards fill at most `num_tokens` rows. Receive ranges are adjacent, in a random
    order, which no planner would produce.
    """
    W, S, C = num_ranks, num_slots, num_replicas
    cuts = np.sort(rng.integers(0, num_tokens + 1, (W, S)), axis=1)
    seq_len = np.diff(cuts, axis=1, prepend=0)
    dst_rank = rng.integers(-1, W, (W, S, C))
    dst_offset = np.zeros((W, S, C), np.int64)
    num_recv = np.zeros((W, W + 1), np.int64)
    for index in rng.permutation(W * S * C):
        r, s, c = np.unravel_index(index, (W, S, C))
        d = dst_rank[r, s, c]
        if d < 0:
            continue
        dst_offset[r, s, c] = num_recv[d, W]
        num_recv[d, r] += seq_len[r, s]
        num_recv[d, W] += seq_len[r, s]
    return dict(
        dst_rank=dst_rank.astype(np.int32),
        dst_offset=dst_offset.astype(np.uint32),
        seq_len=seq_len.astype(np.uint32),
        num_recv_tokens=num_recv.astype(np.uint32),
        num_seqs=np.full(W, S, np.int32),
        num_total_recv_tokens=num_recv[:, W].astype(np.uint32),
        world_size=W,
    )


def named_rows(plan):
    """Yields (rank, row, destination, destination row) of every token that moves, in slot order."""
    W, S = plan["seq_len"].shape
    dst_rank = plan["dst_rank"].reshape(W, S, -1)
    dst_offset = plan["dst_offset"].reshape(W, S, -1)
    for r in range(W):
        stacked = np.cumsum(plan["seq_len"][r]) - plan["seq_len"][r]
        first_rows = plan["src_offset"][r] if "src_offset" in plan else stacked
        for s in range(S):
            for c in range(dst_rank.shape[2]):
                if dst_rank[r, s, c] < 0:
                    continue
                for i in range(int(plan["seq_len"][r, s])):
                    yield (
                        r,
                        int(first_rows[s]) + i,
                        dst_rank[r, s, c],
                        int(dst_offset[r, s, c]) + i,
                    )


def dispatched(plan, x, capacity):
    """Moves `x [W, T, ...]` to receive buffers `[W, capacity, ...]`; other rows are zero."""
    out = np.zeros((x.shape[0], capacity, *x.shape[2:]), x.dtype)
    for r, row, d, dst_row in named_rows(plan):
        out[d, dst_row] = x[r, row]
    return out


def combined(plan, y, num_tokens, accumulate: Any = np.float64):
    """The sum of the replicas of every row, in slot order, not rounded back."""
    out = np.zeros((y.shape[0], num_tokens, *y.shape[2:]), accumulate)
    for r, row, d, dst_row in named_rows(plan):
        out[r, row] += y[d, dst_row].astype(accumulate)
    return out
