"""The list of pairs of blocks that a kernel computes, as walks: one for each block of queries.

A walk goes over consecutive blocks of keys; that of a block of keys, over blocks of queries. Only
its ends are stored: those of 64K tokens fit into 16 KB of scalar memory, whatever the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch.attention.local.options import PassOptions
from jax_cp_dispatch.attention.local.tpu.layout import LANES, TpuBlocks, matrices_together

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
    key_block = jnp.arange(blocks.k.shape[1])
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
    other = jnp.arange(number)
    first = jnp.where(meet, other, number - 1).min(2)
    last = jnp.where(meet, other + 1, 0).max(2)
    steps = jnp.maximum(last - first, 1)
    return jnp.cumsum(steps, 1) - steps, first, last


def walk_of(table, row):
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
