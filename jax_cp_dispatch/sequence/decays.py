"""Products of decays between two rows, as exponentials of sums over exactly the rows between.

Sums of an interval are never differences of longer sums, which would lose the digits that matter
after a strong decay; and a log decay of -inf is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jax_cp_dispatch._residuals import named_pairs
from jax_cp_dispatch.sequence.chunks import dot, lower, upper


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


def decays_of(log: Float[Array, "n G N C F"], ids: Int32[Array, "n G C"]) -> Decays:
    """Sums log decays within the pieces of each chunk."""
    within = lambda mask: jnp.exp(dot(mask(ids, log.dtype), log))
    return Decays(log, within(lower), within(upper))


def decayed_scores(
    rows: tuple[Float[Array, "n G N C H"], ...], k: Float[Array, "n G N C H"], decays: Decays
) -> tuple[Float[Array, "n G N C C"], ...]:
    """Returns sum_h rows[i, h] k[j, h] exp(sum of log decays of rows j + 1, ..., i), for j <= i.

    The sets of rows share the keys and decays. Values above the diagonal are zero.
    """
    shape, size = k.shape[:-2], k.shape[-2]
    flat = lambda x: x.reshape(-1, *x.shape[-2:])  # one batch axis: XLA's products are faster
    rows, k, log = tuple(map(flat, rows)), flat(k), flat(decays.log)
    if log.shape[-1] > 1:
        scores = _channel_scores(rows, k, log)
    else:
        below = np.tri(size, dtype=k.dtype)
        between = dot(below, log * np.tri(size, k=-1, dtype=k.dtype))  # sums over (j, i]
        decay = jnp.exp(between) * below
        scores = tuple(dot(x, _transposed(k)) * decay for x in rows)
    return tuple(named_pairs(x.reshape(*shape, size, size)) for x in scores)


@jax.custom_vjp
def _channel_scores(rows, k, log):
    """By halves of intervals: both factors decay from the middle, so no exponential exceeds 1.

    The derivative computes the factors again: they are as large as the keys, for each level.
    """
    eye = np.eye(k.shape[-2], dtype=k.dtype)
    out = [(x * k).sum(-1, keepdims=True) * eye for x in rows]
    for inside, pairs in _levels(k.shape[-2], k.dtype):
        decay = jnp.exp(_sums(inside, log))
        keys = _transposed(k * decay)
        out = [total + dot(x * decay, keys) * pairs for total, x in zip(out, rows, strict=True)]
    return tuple(out)


def _channel_scores_forward(rows, k, log):
    return _channel_scores(rows, k, log), (rows, k, log)


def _channel_scores_backward(saved, gradients):
    rows, k, log = saved
    on_diagonal = [jnp.diagonal(g, axis1=-2, axis2=-1)[..., None] for g in gradients]
    drows = [g * k for g in on_diagonal]
    dk = sum(g * x for g, x in zip(on_diagonal, rows, strict=True))
    dlog = jnp.zeros_like(log)
    for inside, pairs in _levels(k.shape[-2], k.dtype):
        decay = jnp.exp(_sums(inside, log))
        keys, masked = k * decay, [g * pairs for g in gradients]
        of_rows = [dot(g, keys) * decay for g in masked]
        of_keys = sum(dot(_transposed(g), x * decay) for g, x in zip(masked, rows, strict=True))
        of_keys = of_keys * decay
        each = of_keys * k + sum(d * x for d, x in zip(of_rows, rows, strict=True))
        dlog = dlog + _sums(inside.T, each)
        drows = [a + b for a, b in zip(drows, of_rows, strict=True)]
        dk = dk + of_keys
    return tuple(drows), dk, dlog


_channel_scores.defvjp(_channel_scores_forward, _channel_scores_backward)


def _levels(size: int, dtype: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, for blocks of 2, 4, ... rows, the rows between the middle and each row, and pairs.

    The pairs have a row in the right half of a block and a key in its left half. Every pair below
    the diagonal is in one level.
    """
    row, half = np.arange(size), 1
    while half < size:
        middle = (row // (2 * half) * 2 * half + half)[:, None]
        i, j = row[:, None], row[None]
        inside = np.where(i >= middle, (middle <= j) & (j <= i), (i < j) & (j < middle))
        pairs = (i >= middle) & (j < middle) & (j >= middle - half)
        yield inside.astype(dtype), pairs.astype(dtype)
        half *= 2


def _sums(inside: np.ndarray, x: Float[Array, "batch C H"]) -> Float[Array, "batch C H"]:
    return dot(jnp.broadcast_to(jnp.asarray(inside), (len(x), *inside.shape)), x)


def _transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)
