"""Layouts of blocked attention: an axis cut in blocks, with features or positions minor."""

from __future__ import annotations

import jax.numpy as jnp


def cut(x, block, fill: int | float = 0):
    """`[B, L, ...] -> [B * num_blocks, block, ...]`, the last block of a row filled up."""
    B, L, *rest = x.shape
    num_blocks = -(-L // block)
    widths = [(0, 0), (0, num_blocks * block - L)] + [(0, 0)] * len(rest)
    return jnp.pad(x, widths, constant_values=fill).reshape(B * num_blocks, block, *rest)


def to_rows(x):
    """`[M, block, K, (G,) F] -> [M, K, (G *) block, F]`."""
    x = jnp.moveaxis(x, 1, -2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def to_columns(x):
    """`[M, block, K, (G,) F] -> [M, K, F, (G *) block]`."""
    x = jnp.moveaxis(jnp.moveaxis(x, 1, -1), -2, 2)
    return x.reshape(*x.shape[:3], -1)


def from_rows(x, shape):
    """`[B * nk, K, block, F] -> [B, S, K, F]`."""
    B, S, K, _ = shape
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(B, -1, K, x.shape[-1])[:, :S]


def from_columns(x, shape):
    """`[B * nq, K, F, G * block] -> [B, T, N, F]`."""
    B, T, N, _ = shape
    M, K, F, _ = x.shape
    x = x.reshape(M, K, F, N // K, -1)
    x = jnp.moveaxis(x, (4, 1, 3, 2), (1, 2, 3, 4))
    return x.reshape(B, -1, N, F)[:, :T]
