"""Random masks of arrays, each with the pairs that it admits by its definition."""

from functools import partial
from typing import Any

import numpy as np
from mask_oracle import (
    block_diffusion_pairs,
    block_pairs,
    prefix_pairs,
    range_pairs,
    shared_prefix_pairs,
    tree_pairs,
)
from packed_batches import pack

from jax_cp_dispatch.masks import BlockDiffusion, Blocks, PrefixLM, Ranges, SharedPrefix, Tree


def random_trees(rng, rows, tokens, spans):
    """span_ids [rows, tokens] in depth-first order, parents [rows, spans]; some spans are empty."""
    every = np.arange(rows)
    number = np.argsort(rng.random((rows, spans)), axis=1)  # of the spans, in depth-first order
    parents = np.full((rows, spans), -1)
    path = np.full((rows, spans + 1), -1)  # the last span of each depth, from 1 on
    depth = np.zeros(rows, int)
    for i in range(spans):
        depth = np.minimum(rng.integers(0, depth + 2), i)
        parents[every, number[:, i]] = path[every, depth]
        path[every, depth + 1] = number[:, i]
    place = np.cumsum(rng.integers(0, 3, (rows, tokens)) * (rng.random((rows, tokens)) < 0.5), 1)
    span_ids = np.take_along_axis(number, np.minimum(place, spans - 1), axis=1)
    return np.where(place < spans, span_ids, -1), parents


def random_mask(kind, rng, segment_ids) -> Any:
    """Returns arguments of a mask of this kind, its constructor, and its pairs in each row."""
    shape = segment_ids.shape
    first = np.diff(segment_ids, axis=1, prepend=-1) != 0
    if kind == "prefix":
        column = np.arange(shape[1])
        start = np.maximum.accumulate(np.where(first, column, 0), axis=1)
        length = np.where(first, rng.integers(0, 9, shape), 0)
        in_prefix = column - start < np.take_along_axis(length, start, axis=1)
        return PrefixLM, (in_prefix,), prefix_pairs(in_prefix)
    if kind == "blocks":
        ids = np.repeat(rng.integers(-1, 3, shape), 3, axis=1)[:, : shape[1]]
        return Blocks, (ids,), block_pairs(ids)
    if kind == "shared_prefix":
        ids = np.cumsum(rng.random(shape) < 0.2, axis=1)  # every run another id, prompts apart
        ids = np.where((ids % 4 == 0) | first, 0, ids)  # documents begin with a prompt
        return SharedPrefix, (ids,), shared_prefix_pairs(ids)
    if kind == "tree":
        trees = random_trees(rng, shape[0], shape[1], 6)
        return Tree, trees, tree_pairs(trees[0], trees[1])
    if kind == "block_diffusion":
        return _diffuse, (segment_ids,), block_diffusion_pairs(segment_ids, _SIZE)
    columns = rng.integers(0, shape[1] + 1, (4, *shape))
    arrays = tuple(columns) if kind == "ranges" else tuple(columns[:2])
    return Ranges, arrays, range_pairs(*arrays)


_SIZE = 3
_diffuse = partial(BlockDiffusion, size=_SIZE)

# Of any documents, and all; `pack_for` draws documents for each.
KINDS = ("prefix", "blocks", "shared_prefix", "tree", "ranges", "ranges_of_keys")
ALL_KINDS = (*KINDS, "block_diffusion")


def pack_for(kind, rng, batch, num_tokens, **options):
    """Returns `pack` of documents that this kind of mask admits."""
    if kind != "block_diffusion":
        return pack(rng, batch, num_tokens, **options)
    packed = pack(rng, batch, num_tokens // 2, **options)
    return tuple(np.pad(np.repeat(x, 2, axis=1), ((0, 0), (0, num_tokens % 2))) for x in packed)
