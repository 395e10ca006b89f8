"""Walks through the chunks of a recurrence: the states, and from behind their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jax_cp_dispatch._ranks.varying import vary_alike, vary_like
from jax_cp_dispatch.sequence.chunks import Chunks, Span, dot


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


def walk(
    steps: Steps,
    chunks: Chunks,
    later: Span | None,
    entering: Float[Array, "P N H V"] | None,
    *,
    active: Bool[Array, " n"] | None = None,
) -> tuple[Float[Array, "n G N H V"], Float[Array, "n G N C V"]]:
    """Walks through the chunks, in all groups and heads together.

    Args:
      steps: of every chunk.
      chunks: the pieces.
      later: the pieces that do not start from zero; None: all do.
      entering: their states.
      active: the chunks to walk through; None is all.
    Returns:
      The state before each chunk, and what its rows add.
    """
    u, w, kd, _ = steps
    start = jnp.zeros((*kd.shape[1:3], kd.shape[-1], u.shape[-1]), u.dtype)
    at: Any = None
    group: Any = None
    born = start  # of entering states: what remains behind their first chunks
    if later is not None and entering is not None:
        first, mask = later.chunk(), later.mask
        at, group = later.places[:, 0], later.places[:, 1]
        born = first.take(decay_over(steps)) * mask[:, :, -1:] * entering
        if w is not None:
            u = first.add(u, -dot(first.take(w), entering) * mask)
        at, group, born, *_ = vary_alike([at, group, born, u, kd])
    (start, *_) = vary_alike([start, u, kd, born])

    def step(state: Any, x: Any) -> Any:
        index, u, w, kd, decay, into, last = x
        new = u if w is None else u - dot(w * into, state)
        after = decay * state + dot(across(kd * last), new)
        if at is not None:
            here = at == index

            def enter(after: Array) -> Array:
                only_here = jnp.where(here, group, len(state)).astype(jnp.uint32)
                return after.at[only_here].add(born, mode="drop")

            after = lax.cond(here.any(), enter, lambda x: x, after)
        return after, (state, new)

    def skip(state: Any, x: Any) -> Any:
        return state, (state, jnp.zeros_like(x[1]))

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
    # Steps are branches of a condition, where nothing may begin to vary; see `_if_any`.
    xs = *vary_like([jnp.arange(len(xs[-1]), dtype=jnp.int32)], xs[-1]), *xs
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
