"""Blocks of 128 queries and keys, the lanes of a TPU, and the pairs of them that meet.

A walk goes over consecutive blocks of keys; that of a block of keys, over blocks of queries. Only
its ends are stored: those of 64K tokens fit into 16 KB of scalar memory, whatever the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_cp_dispatch.attention.local.blocks import KeyRanges
from jax_cp_dispatch.attention.local.check_operands import divisors
from jax_cp_dispatch.attention.local.local_options import PassOptions

LANES = 128
_ROWS = 1024  # of the queries of one step: for each key, as many products as hide a step's overhead


class TpuBlocks(NamedTuple):
    """What every kernel reads; R = G * 128 rows of queries."""

    q: Float[Array, "M nq R H"]
    k: Float[Array, "M nk 128 H"]
    v: Float[Array, "M nk 128 Hv"]
    # Of each query: the first key row, one past the last, and its index if keys have ranges of
    # queries. Of each key row then: the first index, and one past the last.
    of_queries: Int32[Array, "M nq rows R"]
    of_keys: Int32[Array, "M nk 2 128"] | None

    @property
    def key_arrays(self) -> tuple[Array, ...]:
        """Returns keys, values, and their ranges of queries if there are any."""
        return self.k, self.v, *(() if self.of_keys is None else (self.of_keys,))


def cut(options: PassOptions, q, ranges: KeyRanges, kv) -> TpuBlocks:
    """Cuts the operands of a pass."""
    num_keys = kv[0].shape[1] * kv[0].shape[2]
    bounds = ranges.of_heads(q.shape[2])
    rows = [cut_rows(options, bounds[:, :, n], fill) for n, fill in enumerate((num_keys, 0))]
    of_keys = None
    if (queries := ranges.queries) is not None:
        rows.append(cut_rows(options, queries.index))
        of_keys = jnp.stack([_cut_keys(x[..., None])[..., 0] for x in (queries.start, queries.end)])
        of_keys = jnp.moveaxis(of_keys, 0, 2)
    k, v = map(_cut_keys, kv)
    return TpuBlocks(cut_queries(options, q), k, v, jnp.stack(rows, 2), of_keys)


def matrices_together(options: PassOptions, blocks: TpuBlocks) -> int:
    """Returns how many KV heads one step computes: if few queries share a head, several."""
    most = max(1, _ROWS // blocks.q.shape[2])
    return max(x for x in divisors(options.kv_heads) if x <= most)


def cut_queries(options: PassOptions, x, fill: int | float = 0):
    """`[M, blocks, G*block_q, F] -> [M, blocks, G*128, F]`; pads the last block with `fill`."""
    return _cut_again(x, options.block_q, LANES, fill)


def uncut_queries(options: PassOptions, x, num_blocks: int):
    """The inverse."""
    return _cut_again(x, LANES, options.block_q, 0)[:, :num_blocks]


def cut_rows(options: PassOptions, x, fill: int | float = 0):
    """`cut_queries` of one number per row, `[M, blocks, G*block_q]`."""
    return cut_queries(options, x[..., None], fill)[..., 0]


def uncut_keys(x, like):
    """Returns keys or values in the blocks of `like`, `[M, nk, block_kv, F]`."""
    x = x.reshape(x.shape[0], -1, x.shape[3])[:, : like.shape[1] * like.shape[2]]
    return x.reshape(like.shape)


def _cut_again(x, rows: int, new_rows: int, fill: int | float):
    if rows == new_rows:
        return x
    M, blocks, all_rows, F = x.shape
    heads = all_rows // rows
    x = jnp.swapaxes(x.reshape(M, blocks, heads, rows, F), 1, 2).reshape(M, heads, -1, F)
    x = _padded(x, new_rows, fill).reshape(M, heads, -1, new_rows, F)
    return jnp.swapaxes(x, 1, 2).reshape(M, -1, heads * new_rows, F)


def _cut_keys(x):
    x = _padded(x.reshape(x.shape[0], 1, -1, x.shape[3]), LANES, 0)
    return x.reshape(x.shape[0], -1, LANES, x.shape[3])


def _padded(x, multiple: int, fill: int | float):
    widths = [(0, 0), (0, 0), (0, -x.shape[2] % multiple), (0, 0)]
    return jnp.pad(x, widths, constant_values=fill)


# Columns of both tables: the steps of all walks before, the first block and one past the last.
# A block that meets none has the walk of one step, because its results must be written.
BEGIN, FIRST, LAST = range(3)
# Of queries: the blocks of keys that all their ranges cover; then their smallest and largest index.
FULL_FIRST, FULL_LAST, INDEX_MIN, INDEX_MAX = range(3, 7)
# Of keys: extremes of their ranges of queries.
START_MIN, START_MAX, END_MIN, END_MAX = range(3, 7)


class Visits(NamedTuple):
    """The walks of each block, for `matrices` that are computed together."""

    of_queries: Int32[Array, "matrices columns nq"]
    of_keys: Int32[Array, "matrices columns nk"]


def find_visits(options: PassOptions, blocks: TpuBlocks) -> Visits:
    """Finds the walks; `jax.numpy` only, of shapes that do not depend on the ranges."""
    together = matrices_together(options, blocks)
    num_keys = blocks.k.shape[1] * LANES
    start, end = blocks.of_queries[:, :, 0], blocks.of_queries[:, :, 1]
    used = start < end
    start, end = jnp.where(used, start, num_keys), jnp.where(used, end, 0)
    smallest = lambda x: x.min(-1).reshape(-1, together, x.shape[1]).min(1)
    largest = lambda x: -smallest(-x)
    first, last = smallest(start) // LANES, -(-largest(end) // LANES)
    of_queries = [-(-largest(start) // LANES), smallest(end) // LANES]
    of_keys = []
    key_block = jnp.arange(blocks.k.shape[1])[None, None]
    meet = (first[..., None] <= key_block) & (key_block < last[..., None])
    if blocks.of_keys is not None:
        index = blocks.of_queries[:, :, 2]
        starts, ends = blocks.of_keys[:, :, 0], blocks.of_keys[:, :, 1]
        seen = starts < ends  # others, as those that pad the last block, hide nothing less
        of_queries += [
            smallest(jnp.where(used, index, _LARGEST)),
            largest(jnp.where(used, index, -1)),
        ]
        of_keys = [
            smallest(jnp.where(seen, starts, _LARGEST)),
            largest(starts),
            smallest(ends),
            largest(ends),
        ]
        meet &= of_keys[0][:, None] <= of_queries[3][..., None]
        meet &= of_keys[3][:, None] > of_queries[2][..., None]
    tables = ([*_walks(meet), *of_queries], [*_walks(jnp.swapaxes(meet, 1, 2)), *of_keys])
    return Visits(*(jnp.stack(table, 1).astype(jnp.int32) for table in tables))


_LARGEST = 2**31 - 1


def _walks(meet):
    """Begin, first and last of the walks over the last axis."""
    number = meet.shape[2]
    other = jnp.arange(number)[None, None]
    first = jnp.where(meet, other, number - 1).min(2)
    last = jnp.where(meet, other + 1, 0).max(2)
    steps = jnp.maximum(last - first, 1)
    return jnp.cumsum(steps, 1) - steps, first, last


def find_walk(table, row):
    """Returns the first block of a walk and one past the last, in a kernel or outside."""
    return table[FIRST, row], jnp.maximum(table[LAST, row], table[FIRST, row] + 1)


def relation(visits: Visits, i, j):
    """Whether block i of queries meets block j of keys; and if so, without hiding a pair."""
    q, k = visits
    meet = (q[FIRST, i] <= j) & (j < q[LAST, i])
    full = (q[FULL_FIRST, i] <= j) & (j < q[FULL_LAST, i])
    if k.shape[0] > START_MIN:
        meet &= (k[START_MIN, j] <= q[INDEX_MAX, i]) & (k[END_MAX, j] > q[INDEX_MIN, i])
        full &= (k[START_MAX, j] <= q[INDEX_MIN, i]) & (k[END_MIN, j] > q[INDEX_MAX, i])
    return meet, full
