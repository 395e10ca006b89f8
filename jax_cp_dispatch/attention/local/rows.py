"""Rows in blocks: the layout `[B*K, blocks, rows, ...]`, and access to single blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def to_rows(x, num_groups, block, fill: int | float = 0):
    """`[B, L, K*G, F] -> [B*K, num_blocks, G*block, F]`; pads the last block with `fill`."""
    B, L, N, F = x.shape
    num_blocks = -(-L // block)
    x = with_rows(x, num_blocks * block, 1, fill)
    x = x.reshape(B, num_blocks, block, num_groups, N // num_groups, F)
    x = jnp.transpose(x, (0, 3, 1, 4, 2, 5))
    return x.reshape(B * num_groups, num_blocks, -1, F)


def cut_tokens(x, block, fill):
    """`[B, L] -> [B, num_blocks, block]`; pads the last block with `fill`."""
    num_blocks = -(-x.shape[1] // block)
    return with_rows(x, num_blocks * block, 1, fill).reshape(x.shape[0], num_blocks, block)


def from_rows(x, shape, num_groups):
    """The inverse: `[B*K, num_blocks, G*block, F] -> [B, L, K*G, F]`, with F of `x`."""
    B, L, N, _ = shape
    _, num_blocks, rows, F = x.shape
    heads = N // num_groups
    x = x.reshape(B, num_groups, num_blocks, heads, rows // heads, F)
    return jnp.transpose(x, (0, 2, 4, 1, 3, 5)).reshape(B, -1, N, F)[:, :L]


def with_rows(x, num_rows: int, axis: int, fill: int | float = 0):
    """Pads the end of an axis; JAX would compile a padding of nothing too."""
    missing = num_rows - x.shape[axis]
    if not missing:
        return x
    widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


class BlockIndex(NamedTuple):
    """The index of one block in several matrices, which are computed together."""

    matrix: Array  # the first one
    num_matrices: int
    block: Array

    def at(self, block) -> BlockIndex:
        """Returns another block of the same matrices."""
        return self._replace(block=block)


def block_of(x, index: BlockIndex):
    """Returns `x[matrices, block]`, `[matrices, ...]`."""
    sizes = (index.num_matrices, 1, *x.shape[2:])
    x = lax.dynamic_slice(x, _corner(x, index), sizes, allow_negative_indices=False)
    return x.reshape(-1, *x.shape[2:])


def set_block(x, index: BlockIndex, block):
    """Returns `x` with `block` at `index`."""
    block = block.reshape(index.num_matrices, 1, *block.shape[1:])
    return lax.dynamic_update_slice(x, block, _corner(x, index), allow_negative_indices=False)


def _corner(x, index: BlockIndex):
    return [jnp.int32(corner) for corner in (index.matrix, index.block, *[0] * (x.ndim - 2))]
