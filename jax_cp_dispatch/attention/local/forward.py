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

from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch.attention.local.blocks import (
    KeyRanges,
    accumulator,
    each_query_block,
    matmul,
    positions,
    soft_capped,
    widen,
)
from jax_cp_dispatch.attention.local.query_ranges import each_key_block
from jax_cp_dispatch.attention.local.rows import block_of, from_rows, set_block


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
