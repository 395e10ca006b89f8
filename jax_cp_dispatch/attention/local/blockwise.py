"""Forward pass of local attention, blockwise: an online softmax over each query block's keys.

Logits are `[matrices, G * block_q, block_kv]`: both products then read and write them without a
transposition.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._ranks.options import vary_like
from jax_cp_dispatch.attention.local.ranges import (
    KeyRanges,
    accumulator,
    block_of,
    each_key_block,
    each_query_block,
    from_rows,
    matmul,
    positions,
    set_block,
    soft_capped,
    to_rows,
    widen,
)


class OnlineSoftmax(NamedTuple):
    """The online softmax of each row of the query blocks, over the keys seen so far."""

    peak: Array  # [B*K, nq, G*block_q] largest logit
    total: Array  # [B*K, nq, G*block_q] sum of exp(logit - peak)
    acc: Array  # [B*K, nq, G*block_q, Hv] likewise, times the values

    @classmethod
    def of_nothing(cls, q, num_features) -> OnlineSoftmax:
        # A finite first peak keeps exp(-inf - peak) = 0 for rows without keys so far.
        dtype = accumulator(q)
        peak = jnp.full(q.shape[:3], jnp.finfo(dtype).min, dtype)
        acc = jnp.zeros((*q.shape[:3], num_features), dtype)
        return cls(*vary_like((peak, jnp.zeros_like(peak), acc), q))

    def result(self, shape, num_groups):
        """Returns `(out, lse)` of `local_attention`, for queries of this shape."""
        empty = self.total == 0
        total = jnp.where(empty, 1, self.total)
        lse = jnp.where(empty, -jnp.inf, self.peak + jnp.log(total))
        out = from_rows(self.acc / total[..., None], shape, num_groups)
        return out, jnp.swapaxes(from_rows(lse[..., None], shape, num_groups)[..., 0], 1, 2)

    def max_logits(self, shape, num_groups):
        """Returns the largest logit of each row, `[B, N, T]`; -inf if it has no keys."""
        peak = jnp.where(self.total == 0, -jnp.inf, self.peak)
        return jnp.swapaxes(from_rows(peak[..., None], shape, num_groups)[..., 0], 1, 2)


def attend_blockwise(
    options, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    """Implements `attend_blocks` of `passes.py`."""
    seen = seen or OnlineSoftmax.of_nothing(q, kv[1].shape[3])
    q, (k, v) = options.scale * widen(q), map(widen, kv)

    def one_query_block(seen, index):
        q_block, own = block_of(q, index), ranges.of_queries(index)
        blocks, rows, queries = own.key_blocks(options), own.of_heads(q.shape[2]), own.queries

        def exponentials(masked, j, logits, peak, of_pair):
            logits, _ = soft_capped(options, logits)
            if masked:
                column = positions(options, j)[None, None]
                allowed = (column >= rows[:, 0, :, None]) & (column < rows[:, 1, :, None])
                if of_pair is not None:
                    allowed &= of_pair.allow()
                logits = jnp.where(allowed, logits, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=2))
            return jnp.exp(logits - new_peak[..., None]), new_peak

        def add_block(j, row):
            peak, total, acc = row
            of_pair = queries and queries.of_keys(index.at(j))
            # Most blocks are inside all ranges; a mask would cost them a pass over the logits.
            is_whole = (j >= blocks.first_whole) & (j < blocks.last_whole)
            p, new_peak = lax.cond(
                is_whole if of_pair is None else is_whole & of_pair.hide_none(),
                functools.partial(exponentials, False),
                functools.partial(exponentials, True),
                j,
                matmul(q_block, block_of(k, index.at(j)), (2, 2)),
                peak,
                of_pair,
            )
            keep = jnp.exp(peak - new_peak)
            total = total * keep + jnp.sum(p, axis=2)
            acc = acc * keep[..., None] + matmul(p, block_of(v, index.at(j)), (2, 1))
            return new_peak, total, acc

        row = tuple(block_of(x, index) for x in seen)
        row = each_key_block(index, (blocks.first, blocks.last, queries), add_block, row)
        return OnlineSoftmax(*(set_block(x, index, y) for x, y in zip(seen, row, strict=True)))

    return each_query_block(options, one_query_block, seen, q)


# ---- Backward pass of local attention, blockwise: recomputes the probabilities.
#
# Logits are transposed, `[matrices, block_kv, G * block_q]`: four of the five products then read
# and
# write them without a transposition. Only `dq` is accumulated transposed.


class OutputCotangents(NamedTuple):
    """The whole softmax and its cotangents, for each row of the query blocks.

    dL/dlogit_j = p_j (dout . v_j - delta), delta = dout . out - dlse, because dlse/dlogit_j = p_j.
    """

    dout: Array  # [B*K, nq, G*block_q, Hv], in its own dtype
    lse: Array  # [B*K, nq, G*block_q]; inf, hence p = 0, for empty ranges
    delta: Array  # [B*K, nq, G*block_q]


class SoftmaxGradients(NamedTuple):
    """Output and lse of the whole softmax, and their cotangents; None: zero."""

    out: Array  # [B, T, N, Hv]
    lse: Array  # [B, N, T]
    dout: Array
    dlse: Array | None = None


def tile_cotangents(options, used, whole: SoftmaxGradients, num_groups) -> OutputCotangents:
    """Cuts the whole softmax into blocks; rows outside `used`, `[B, T]`, are zero."""
    out, lse, dout, dlse = whole
    dtype = accumulator(lse)
    lse = jnp.swapaxes(lse.astype(dtype), 1, 2)
    used = used[:, :, None] & (lse > -jnp.inf)
    delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)
    if dlse is not None:
        delta = delta - jnp.swapaxes(dlse, 1, 2).astype(dtype)

    def rows(x, fill: float = 0):
        return to_rows(x[..., None], num_groups, options.block_q, fill)[..., 0]

    return OutputCotangents(
        to_rows(jnp.where(used[..., None], dout, 0), num_groups, options.block_q),
        rows(jnp.where(used, lse, jnp.inf), jnp.inf),
        rows(jnp.where(used, delta, 0)),
    )


def gradients_blockwise(options, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq):
    """Implements `block_gradients` of `passes.py`."""
    q, (k, v) = options.scale * widen(q), map(widen, kv)
    cotangents = cotangents._replace(dout=widen(cotangents.dout))
    k_columns = options.scale * jnp.swapaxes(k, 2, 3)

    def one_query_block(carry, index):
        q_block, dout, lse, delta = (block_of(x, index) for x in (q, *cotangents))
        own = ranges.of_queries(index)
        blocks, rows, queries = own.key_blocks(options), own.of_heads(q.shape[2]), own.queries

        def add_block(j, carry):
            dq_block, dk, dv = carry
            there = index.at(j)
            k_block, v_block = block_of(k, there), block_of(v, there)
            position = positions(options, j)[None, :, None]
            logits, slope = soft_capped(options, matmul(k_block, q_block, (2, 2)))
            allowed = (position >= rows[:, :1]) & (position < rows[:, 1:])
            if queries is not None:
                allowed &= jnp.swapaxes(queries.of_keys(there).allow(), 1, 2)
            p = jnp.exp(jnp.where(allowed, logits, -jnp.inf) - lse[:, None])
            ds = p * (matmul(v_block, dout, (2, 2)) - delta[:, None]) * slope
            dq_block = dq_block + matmul(block_of(k_columns, there), ds, (2, 1))
            dk = set_block(dk, there, block_of(dk, there) + matmul(ds, q_block, (2, 1)))
            dv = set_block(dv, there, block_of(dv, there) + matmul(p, dout, (2, 1)))
            return dq_block, dk, dv

        dq, *dkv = carry
        row = block_of(dq, index), *dkv
        dq_block, *dkv = each_key_block(index, (blocks.first, blocks.last, queries), add_block, row)
        return set_block(dq, index, dq_block), *dkv

    zeros = vary_like((jnp.zeros_like(k), jnp.zeros_like(v)), q)
    return each_query_block(options, one_query_block, (dq, *zeros), q)


def begin_dq(q):
    """Zero gradients for query blocks q."""
    return jnp.zeros_like(jnp.swapaxes(q, 2, 3), accumulator(q))


def finish_dq(dq, shape, num_groups):
    """Returns dq as `[B, T, N, H]`."""
    return from_rows(jnp.swapaxes(dq, 2, 3), shape, num_groups)
