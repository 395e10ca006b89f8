"""Products of decays between two rows, as exponentials of sums over exactly the rows between.

Sums of an interval are never differences of longer sums, which would lose the digits that matter
after a strong decay; and a log decay of -inf is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_cp_dispatch.sequence.chunks import Chunks, blocks_of_four, dot

# Rows of the blocks of `channel_scores` that are multiplied as sums.
_SMALL = 8


class Decays(NamedTuple):
    """The decays of each row in its chunk, per head (F = 1) or channel (F = H).

    Attributes:
      log: log decays, finite.
      into: from the start of its piece, or of the chunk, through the row itself.
      out: from behind the row to the end of its piece, or of the chunk.
    """

    log: Float[Array, "n G N C F"]
    into: Float[Array, "n G N C F"]
    out: Float[Array, "n G N C F"]


def finite(log_decay: Array) -> Array:
    """Replaces -inf by a number whose exponential is zero, so that no product with it is NaN."""
    return jnp.maximum(log_decay, -120.0 if log_decay.dtype == jnp.float32 else -800.0)


def decays_of(log: Float[Array, "n G N C F"], chunks: Chunks) -> Decays:
    """Sums log decays within the pieces of each chunk."""
    return Decays(log, jnp.exp(dot(chunks.lower(), log)), jnp.exp(dot(chunks.upper(), log)))


def decayed_scores(
    rows: Float[Array, "S n G N C H"], k: Float[Array, "n G N C H"], decays: Decays
) -> Float[Array, "S n G N C C"]:
    """Returns sum_h rows[i, h] k[j, h] exp(sum of log decays of rows j + 1, ..., i), for j <= i.

    S sets of rows share the keys and decays. Values above the diagonal are zero.
    """
    size = k.shape[-2]
    if decays.log.shape[-1] > 1:
        return _channel_scores(rows, k, decays.log)
    lower = np.tri(size, dtype=k.dtype)
    between = dot(lower, decays.log * np.tri(size, k=-1, dtype=k.dtype))  # sums over (j, i]
    return dot(rows, k.swapaxes(-1, -2)) * (jnp.exp(between) * lower)


def _channel_scores(rows, k, log):
    """By halves of intervals: both factors decay from the middle, so no exponential exceeds 1."""
    shape, size = rows.shape[:-1], 1
    k, log = (x.reshape(-1, *x.shape[-2:]) for x in (k, log))  # few axes: XLA's loops are simpler
    rows = rows.reshape(len(rows), *k.shape)
    out = (rows * k).sum(-1)[..., None, None]
    # Sums from the start of a block through each row, and from behind each row to its end.
    down, up = log[:, :, None], jnp.zeros_like(log)[:, :, None]
    while size < k.shape[-2]:
        pair = lambda x: x.reshape(*x.shape[:-3], -1, 2, *x.shape[-2:])
        down, up, out = map(pair, (down, up, out))
        (down0, down1), (up0, up1) = ((x[..., 0, :, :], x[..., 1, :, :]) for x in (down, up))
        halves = lambda x, size=size: x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
        right = halves(rows)[..., 1, :, :] * jnp.exp(down1)
        left = halves(k)[..., 0, :, :] * jnp.exp(up0)
        if size < _SMALL:
            cross = (right[..., :, None, :] * left[..., None, :, :]).sum(-1)
        else:
            cross = dot(right, left.swapaxes(-1, -2))
        out = blocks_of_four(out[..., 0, :, :], cross, out[..., 1, :, :])
        whole0, whole1 = down0[..., -1:, :], down1[..., -1:, :]
        down = jnp.concatenate([down0, down1 + whole0], -2)
        up = jnp.concatenate([up0 + whole1, up1], -2)
        size *= 2
    return out.reshape(*shape, shape[-1])
