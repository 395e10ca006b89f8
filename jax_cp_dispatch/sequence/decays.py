"""Products of decays between two rows, as exponentials of sums over exactly the rows between.

Sums of an interval are never differences of longer sums, which would lose the digits that matter
after a strong decay; and a log decay of -inf is exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jax_cp_dispatch._residuals import named_pairs
from jax_cp_dispatch.sequence.chunks import dot


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


def make_decays(log: Float[Array, "n G N C F"], same: Float[Array, "n G 1 C C"]) -> Decays:
    """Sums log decays within the pieces of each chunk; `same`: 1 for two rows of one piece."""
    lower = np.tri(log.shape[-2], dtype=log.dtype)[None, None, None]
    return Decays(log, *(jnp.exp(dot(same * mask, log)) for mask in (lower, 1 - lower)))


def decayed_scores(
    rows: tuple[Float[Array, "n G N C H"], ...], k: Float[Array, "n G N C H"], decays: Decays
) -> tuple[Float[Array, "n G N C C"], ...]:
    """Returns sum_h rows[i, h] k[j, h] exp(sum of log decays of rows j + 1, ..., i), for j <= i.

    The sets of rows share the keys and decays. Values above the diagonal are zero.
    """
    shape, size = k.shape[:-2], k.shape[-2]
    flat = lambda x: lax.collapse(x, 0, x.ndim - 2)  # one batch axis: XLA's products are faster
    rows, k, log = tuple(map(flat, rows)), flat(k), flat(decays.log)
    if log.shape[-1] > 1:
        scores = _channel_scores(rows, k, log)
    else:
        below = np.tri(size, dtype=k.dtype)
        between = dot(below, log * np.tri(size, k=-1, dtype=k.dtype)[None])  # sums over (j, i]
        decay = jnp.exp(between) * below[None]
        scores = tuple(dot(x, _transposed(k)) * decay for x in rows)
    return tuple(named_pairs(x.reshape(*shape, size, size)) for x in scores)


@jax.custom_vjp
def _channel_scores(rows, k, log):
    """By halves of intervals: both factors decay from the middle, so no exponential exceeds 1.

    The derivative computes the factors again: they are as large as the keys, for each level.
    """
    eye = np.eye(k.shape[-2], dtype=k.dtype)[None]
    start = [(x * k).sum(-1, keepdims=True) * eye for x in rows]

    def level(out: Any, x: Any) -> Any:
        inside, pairs = x
        decay = jnp.exp(_sums(inside, log))
        keys, pairs = _transposed(k * decay), pairs[None]
        return [y + dot(x * decay, keys) * pairs for y, x in zip(out, rows, strict=True)], None

    return tuple(lax.scan(level, start, _levels(k.shape[-2], k.dtype))[0])


def _channel_scores_forward(rows, k, log):
    return _channel_scores(rows, k, log), (rows, k, log)


def _channel_scores_backward(saved, gradients):
    rows, k, log = saved
    on_diagonal = [jnp.diagonal(g, axis1=-2, axis2=-1)[..., None] for g in gradients]
    drows = [g * k for g in on_diagonal]
    dk = sum(g * x for g, x in zip(on_diagonal, rows, strict=True))

    def level(sums: Any, x: Any) -> Any:
        drows, dk, dlog = sums
        inside, pairs = x
        decay = jnp.exp(_sums(inside, log))
        keys, masked = k * decay, [g * pairs[None] for g in gradients]
        of_rows = [dot(g, keys) * decay for g in masked]
        of_keys = sum(dot(_transposed(g), x * decay) for g, x in zip(masked, rows, strict=True))
        of_keys = of_keys * decay
        each = of_keys * k + sum(d * x for d, x in zip(of_rows, rows, strict=True))
        drows = [a + b for a, b in zip(drows, of_rows, strict=True)]
        return (drows, dk + of_keys, dlog + _sums(_transposed(inside), each)), None

    start = drows, dk, jnp.zeros_like(log)
    (drows, dk, dlog), _ = lax.scan(level, start, _levels(k.shape[-2], k.dtype))
    return tuple(drows), dk, dlog


_channel_scores.defvjp(_channel_scores_forward, _channel_scores_backward)


def _levels(size: int, dtype: Any) -> tuple[Float[Array, "n C C"], Float[Array, "n C C"]]:
    """Returns, for blocks of 2, 4, ... rows, the rows between the middle and each row, and pairs.

    The pairs have a row in the right half of a block and a key in its left half. Every pair below
    the diagonal is in one level.
    """
    row, column = np.indices((size, size))
    half = 2 ** np.arange(size.bit_length() - 1)[:, None, None]
    middle = row // (2 * half) * 2 * half + half
    right = (middle <= column) & (column <= row)
    inside = np.where(row >= middle, right, (row < column) & (column < middle))
    pairs = (row >= middle) & (column < middle) & (column >= middle - half)
    return jnp.asarray(inside, dtype), jnp.asarray(pairs, dtype)


def _sums(inside: Float[Array, "C C"], x: Float[Array, "batch C H"]) -> Float[Array, "batch C H"]:
    return dot(jnp.broadcast_to(inside, (len(x), *inside.shape)), x)


def _transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)
