"""Walks through the chunks of a recurrence: the states, and from behind their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_cp_dispatch._ranks.varying import vary_alike, vary_like
from jax_cp_dispatch.sequence.chunks import Chunks, dot


class Steps(NamedTuple):
    """How the state S [H, V] of a head changes over the rows of each chunk.

        new = u - w S    what the rows add, after what they read
        S'  = d S + kd^T new

    Attributes:
      u: what the rows add to a state of zero.
      w: what they read; None if they read nothing.
      kd: keys, decayed to the end of their piece or chunk.
      into: decay from the start of the piece, or of the chunk, through each row.
    """

    u: Float[Array, "n G N C V"]
    w: Float[Array, "n G N C H"] | None
    kd: Float[Array, "n G N C H"]
    into: Float[Array, "n G N C F"]


def walk(steps, chunks, later, entering, *, active=None):
    """Walks through the chunks, in all groups and heads together.

    Args:
      steps: of every chunk.
      chunks: the pieces.
      later: the pieces that do not start from zero, a `Span`; None: all do.
      entering: their states; columns beyond those of u are of rows that add nothing.
      active: the chunks to walk through; None is all.
    Returns:
      The state before each chunk, and what its rows add.
    """
    u, w, kd, _ = steps
    num_columns = u.shape[-1] if entering is None else entering.shape[-1]
    start = jnp.zeros((*kd.shape[1:3], kd.shape[-1], num_columns), u.dtype)
    more = [(0, 0)] * 3 + [(0, num_columns - u.shape[-1])]
    padded = lambda u: jnp.pad(u, more) if more[-1][1] else u
    reads = born = None
    if later is not None:
        at, mask = later.chunk(), later.mask
        reads = None if w is None else -dot(at.take(w), entering) * mask
        born = at.take(decay_over(steps)) * mask[:, :, -1:] * entering
    (start, *_) = vary_alike([start, u, kd, *([] if born is None else [born])])

    def step(state: Any, x: Any) -> Any:
        index, u, w, kd, decay, into, last = x
        new = padded(u) if w is None else padded(u) - dot(w * into, state)
        after = decay * state
        if later is not None:
            here = later.index[:, 0] == index

            def enter(*to: Array) -> Any:
                group = jnp.where(here, later.index[:, 1], len(state)).astype(jnp.uint32)
                added = (born,) if w is None else (born, reads)
                add = lambda x, y: x.at[group].add(y, mode="drop")
                return tuple(map(add, to, added))

            to = (after,) if w is None else (after, new)
            after, *new_of_later = lax.cond(here.any(), enter, lambda *to: to, *to)
            new = new if w is None else new_of_later[0]
        after = after + dot(across(kd * last), new)
        return after, (state, new)

    def skip(state: Any, x: Any) -> Any:
        return state, (state, padded(jnp.zeros_like(x[1])))

    xs = u, w, kd, decay_over(steps, chunks), chunks.into, chunks.last
    return _scan(step, skip, active, start, xs)


def walk_back(steps, chunks, dstates, dnew, *, active=None):
    """Returns the gradients of the state behind each chunk, and of what its rows add."""
    w, kd = steps.w, steps.kd

    def step(after: Any, x: Any) -> Any:
        _, w, kd, decay, into, last, dstate, dnew = x
        dnew = dnew + dot(kd * last, after)
        before = decay * after + dstate
        if w is not None:
            before = before - dot(across(w * into), dnew)
        return before, (after, dnew)

    def skip(after: Any, x: Any) -> Any:  # no piece goes on behind active chunks
        return jnp.zeros_like(after), (after, x[-1])

    (start,) = vary_like([jnp.zeros_like(dstates[0])], dnew)
    xs = w, kd, decay_over(steps, chunks), chunks.into, chunks.last, dstates, dnew
    return _scan(step, skip, active, start, xs, reverse=True)


def _scan(step, skip, active, start, xs, *, reverse=False):
    """Scans over chunks and skips those that are not active; `step` gets the index too."""
    xs = jnp.arange(len(xs[-1]), dtype=jnp.int32), *xs
    if active is None:
        return lax.scan(step, start, xs, reverse=reverse)[1]
    chosen = lambda state, x: lax.cond(x[0], step, skip, state, x[1])
    return lax.scan(chosen, start, (active, xs), reverse=reverse)[1]


def decay_over(steps: Steps, chunks: Chunks | None = None) -> Float[Array, "n G N F 1"]:
    """Returns the decay over each chunk, of its last piece; with `chunks`, if that entered it."""
    decay = steps.into[..., -1, :]
    return (decay if chunks is None else decay * chunks.into[..., -1, :])[..., None]


def across(x: Array) -> Array:
    """Returns the transposed matrices."""
    return x.swapaxes(-1, -2)
