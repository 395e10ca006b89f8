"""NumPy oracle of overlapped GEMMs: float64, rank by rank, from the definition.

Arrays have a leading rank axis; `counts` are each rank's tokens per batch. Every rank's array has
space for the largest count; rows after its own tokens are not read, and zero in results.
"""

from typing import Any

import numpy as np


def wide(*arrays) -> Any:
    return [None if a is None else np.asarray(a).astype(np.float64) for a in arrays]


def even(x, num_ranks=None):
    """Returns the counts of full arrays, or of evenly divided tokens."""
    rows = x.shape[-2]
    return (rows,) * len(x) if num_ranks is None else (rows // num_ranks,) * num_ranks


def gathered(x, counts=None):
    """[p, *batch, T, K] as one sequence [*batch, M, K]."""
    real = [x[q][..., :count, :] for q, count in enumerate(counts or even(x))]
    return np.concatenate(real, axis=-2)


def scattered(total, counts):
    """[*batch, M, N] as [p, *batch, T, N]; other rows are zero."""
    room = np.zeros((len(counts), *total.shape[:-2], max(counts), total.shape[-1]))
    begin = 0
    for rank, count in enumerate(counts):
        room[rank][..., :count, :] = total[..., begin : begin + count, :]
        begin += count
    return room


def all_gather_matmul(x, w, bias=None, counts=None):
    """[p, *batch, T, K], [p, K, N], [p, N] -> [p, *batch, M, N]."""
    x, w, bias = wide(x, w, bias)
    together = gathered(x, counts)
    out = np.stack([together @ of_rank for of_rank in w])
    return out if bias is None else out + bias.reshape(len(bias), *[1] * (out.ndim - 2), -1)


def matmul_reduce_scatter(x, w, bias=None, counts=None):
    """[p, *batch, M, K], [p, K, N], [p, N] -> [p, *batch, T, N]."""
    x, w, bias = wide(x, w, bias)
    counts = counts or even(x, len(x))
    total = sum(x[rank] @ w[rank] for rank in range(len(x)))
    out = scattered(total, counts)
    if bias is not None:
        for rank, count in enumerate(counts):
            out[rank][..., :count, :] += bias[rank]
    return out


def all_gather_matmul_gradients(x, w, dy, counts=None):
    """(dx, dw, dbias) from dy [p, *batch, M, N]."""
    x, w, dy = wide(x, w, dy)
    counts = counts or even(x)
    dx = sum(dy[rank] @ w[rank].T for rank in range(len(x)))
    together = gathered(x, counts)
    dw = np.stack([product_of_rows(together, of_rank) for of_rank in dy])
    return scattered(dx, counts), dw, sum_of_rows(dy)


def matmul_reduce_scatter_gradients(x, w, dy, counts=None):
    """(dx, dw, dbias) from dy [p, *batch, T, N]."""
    x, w, dy = wide(x, w, dy)
    counts = counts or even(x, len(x))
    together = gathered(dy, counts)
    dx = np.stack([together @ of_rank.T for of_rank in w])
    dw = np.stack([product_of_rows(of_rank, together) for of_rank in x])
    own = [dy[rank][..., :count, :] for rank, count in enumerate(counts)]
    return dx, dw, np.stack([sum_of_rows(each[None])[0] for each in own])


def product_of_rows(a, b):
    """a^T b, summed over batches and rows."""
    rows = range(a.ndim - 1)
    return np.tensordot(a, b, (rows, rows))


def sum_of_rows(dy):
    return dy.sum(axis=tuple(range(1, dy.ndim - 1)))


def sums_in_rank_order(parts):
    """Sums float32 [p, ...] as ((0 + 1) + 2) + ..., rounding after each addition."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = (total + part.astype(np.float32)).astype(np.float32)
    return total


# ---- `gemm`: all arrays have two dimensions after the rank axis.


def ring_order(rank, num_ranks):
    """The order in which a rank of an atomic ring receives the chunks: r - 1, r - 2, ..., r."""
    return [(rank - step) % num_ranks for step in range(1, num_ranks + 1)]


def engine_gather(lhs, rhs, bias=None, *, atomic=False):
    """(output [p, M, N], aux) of the ring's all-gather; aux of the atomic one is its own lhs."""
    (lhs,) = wide(lhs)
    out = all_gather_matmul(lhs, rhs, bias)
    if not atomic:
        return out, np.stack([gathered(lhs)] * len(lhs))
    chunks = out.reshape(len(lhs), *lhs.shape[:2], -1)
    turned = [chunks[rank][ring_order(rank, len(lhs))] for rank in range(len(lhs))]
    return np.stack(turned).reshape(out.shape), lhs


def engine_scatter(lhs, rhs, bias=None, *, atomic=False):
    """The reduce-scatter [p, M/p, N]; the lhs of the atomic ring is in ring order."""
    (lhs,) = wide(lhs)
    p, rows, k = lhs.shape
    if atomic:
        straight = np.empty((p, p, rows // p, k))
        for rank in range(p):
            straight[rank][ring_order(rank, p)] = lhs[rank].reshape(p, rows // p, k)
        lhs = straight.reshape(lhs.shape)
    return matmul_reduce_scatter(lhs, rhs, bias)


def bulk_gather(aux):
    return np.stack([gathered(aux)] * len(aux))


def bulk_scatter(aux):
    (aux,) = wide(aux)
    return scattered(aux.sum(0), even(aux, len(aux)))
