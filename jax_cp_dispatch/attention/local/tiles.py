"""Passes over any ranges, tile by tile; a tile combines blocks to a suitable size for GPUs.

A block is too little work for a GPU. A tile holds about `TILE_ROWS` rows of every matrix at once.
Only pairs of tiles within the ranges are visited.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch.attention.local.backward import OutputCotangents
from jax_cp_dispatch.attention.local.blocks import KeyRanges
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax
from jax_cp_dispatch.attention.local.options import PassOptions

TILE_ROWS = 1024


def attend_in_tiles(
    attend, options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    """`attend_blocks` of `passes.py` from `attend`, which is called with the blocks of tiles."""
    seen = seen or OnlineSoftmax.of_nothing(q, kv[1].shape[3])

    def one_query_tile(i, seen):
        def add_tile(j, seen_tile):
            held = _take(kv, kv_blocks, j)
            return attend(q_tile, _shifted(its, held[0], j), held, seen_tile)

        q_tile, its, seen_tile = (_take(x, q_blocks, i) for x in (q, ranges, seen))
        seen_tile = lax.fori_loop(*_reach(its, kv_blocks), add_tile, seen_tile)
        return _put(seen, seen_tile, q_blocks, i)

    q_blocks = _blocks_of_tile(q, options.block_q)
    kv_blocks = _blocks_of_tile(kv[0], options.block_kv)
    return lax.fori_loop(0, q.shape[1] // q_blocks, one_query_tile, seen)


def gradients_in_tiles(gradients, options: PassOptions, queries, ranges: KeyRanges, kv, dq):
    """Likewise `gradients_of_blocks`; `queries` are q and its cotangents."""

    def one_query_tile(i, grads):
        def add_tile(j, carry):
            dq_tile, dkv = carry
            held = _take(kv, kv_blocks, j)
            at = _shifted(its, held[0], j)
            dq_tile, *added = gradients(its_queries, at, held, dq_tile)
            added = jax.tree.map(jnp.add, _take(dkv, kv_blocks, j), tuple(added))
            return dq_tile, _put(dkv, added, kv_blocks, j)

        dq, *dkv = grads
        its_queries, its, dq_tile = (_take(x, q_blocks, i) for x in (queries, ranges, dq))
        carry = dq_tile, tuple(dkv)
        dq_tile, dkv = lax.fori_loop(*_reach(its, kv_blocks), add_tile, carry)
        return _put(dq, dq_tile, q_blocks, i), *dkv

    q, _ = queries
    q_blocks = _blocks_of_tile(q, options.block_q)
    kv_blocks = _blocks_of_tile(kv[0], options.block_kv)
    nothing = dq, *vary_like((jnp.zeros(x.shape, dq.dtype) for x in kv), dq)
    return lax.fori_loop(0, q.shape[1] // q_blocks, one_query_tile, nothing)


def masked_attention(q, kv, ranges, scale):
    """`(out, lse)` of one tile, `[M, G, rows, ...]`, by plain products: for starts of documents."""
    k, v = kv
    logits = _logits(q, k, ranges, scale)
    lse = jax.nn.logsumexp(logits, axis=3)
    p = jnp.exp(logits - jnp.maximum(lse, jnp.finfo(lse.dtype).min)[..., None])
    return _product("mgts,msh->mgth", p.astype(v.dtype), v[:, 0]), lse


def masked_gradients(q, kv, ranges, scale, cotangents: OutputCotangents):
    """`(dq, dk, dv)` of one tile, for an lse that is not -inf."""
    (k, v), (dout, lse, delta, _) = kv, cotangents
    p = jnp.exp(_logits(q, k, ranges, scale) - lse[..., None])
    dp = _product("mgth,msh->mgts", dout, v[:, 0])
    ds = (scale * p * (dp - delta[..., None])).astype(q.dtype)
    dq = _product("mgts,msh->mgth", ds, k[:, 0])
    dk = _product("mgts,mgth->msh", ds, q)
    dv = _product("mgts,mgth->msh", p.astype(q.dtype), dout)
    return dq, dk[:, None], dv[:, None]


def _logits(q, k, ranges, scale):
    start, end = ranges
    position = jnp.arange(k.shape[2])[None, None]
    allowed = (position >= start[..., None]) & (position < end[..., None])
    logits = scale * _product("mgth,msh->mgts", q, k[:, 0])
    return jnp.where(allowed[:, None], logits, -jnp.inf)


def _product(axes, x, y):
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _blocks_of_tile(x, block) -> int:
    """Returns the number of blocks of a tile, a divisor of all, so tiles have equal size."""
    num_blocks = x.shape[1]
    most = max(1, min(num_blocks, TILE_ROWS // block))
    return next(n for n in range(most, 0, -1) if num_blocks % n == 0)


def _reach(ranges: KeyRanges, kv_blocks):
    """The first tile of keys, and one past the last, to which a query of a tile attends."""
    return jnp.min(ranges.first) // kv_blocks, -(-jnp.max(ranges.last) // kv_blocks)


def _shifted(ranges: KeyRanges, k, j) -> KeyRanges:
    """The same ranges, in rows of key tile j."""
    size = k.shape[1] * k.shape[2]
    start, end = (jnp.clip(x - j * size, 0, size) for x in ranges[:2])
    return ranges._replace(start=start, end=end)


def _take(arrays, num_blocks, i):
    return jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, i * num_blocks, num_blocks, axis=1), arrays
    )


def _put(arrays, tiles, num_blocks, i):
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * num_blocks, axis=1), arrays, tiles
    )
