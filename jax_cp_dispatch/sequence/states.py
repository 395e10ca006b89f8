"""The states of a recurrence in chunks: from chunk to chunk, and into and out of cut pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jax_cp_dispatch._ranks.varying import vary_alike
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
      chunks: the pieces.
    """

    u: Float[Array, "n G N C V"]
    w: Float[Array, "n G N C H"] | None
    kd: Float[Array, "n G N C H"]
    into: Float[Array, "n G N C F"]
    chunks: Chunks


class Entry(NamedTuple):
    """States that enter pieces: their first rows, whether they exist, and their states."""

    row: Int32[Array, " P"]
    used: Bool[Array, " P"]
    state: Float[Array, "P N H V"]


def walk(
    steps: Steps, entry: Entry | None = None, *, active: Bool[Array, " n"] | None = None
) -> tuple[Float[Array, "n G N H V"], Any]:
    """Walks through the chunks, in all groups and heads together.

    Args:
      steps: of every chunk.
      entry: the pieces that do not start from zero.
      active: the chunks behind which states are needed; others are skipped.
    Returns:
      The state before each chunk, and, without `active`, what its rows add.
    """
    u, w, kd, into, chunks = steps
    kd = kd * chunks.last
    decay = (into * chunks.into)[..., -1, :, None]
    if w is not None:
        w = w * chunks.into
    shape = *kd.shape[1:3], kd.shape[-1], u.shape[-1]
    born = jnp.zeros((len(u), 1, 1, 1, 1), u.dtype)
    if entry is not None:
        at = chunks.place_of(entry.row, entry.used)
        if steps.w is not None:
            u = u.at[at.where].add(-dot(steps.w[at.where], entry.state) * at.mask)
        remains = at.mask[:, :, -1] * into[at.where][:, :, -1]  # of pieces that reach the end
        born = jnp.zeros((len(u), *shape), u.dtype)
        born = born.at[at.where].add(remains[..., None] * entry.state)

    start, u, kd, decay, born = vary_alike([jnp.zeros(shape, u.dtype), u, kd, decay, born])
    if active is None:
        return _scan(start, u, w, kd, decay, born)

    def step_if_active(state: Any, x: Any) -> Any:
        x, is_active = x
        after = lax.cond(is_active, lambda s, x: _step(s, x)[0], lambda s, x: s, state, x)
        return after, state

    return lax.scan(step_if_active, start, ((u, w, kd, decay, born), active))[1], None


def _step(state: Any, x: Any) -> Any:
    u, w, kd, decay, born = x
    new = u if w is None else u - dot(w, state)
    return decay * state + dot(kd.swapaxes(-1, -2), new) + born, (state, new)


@jax.custom_vjp
def _scan(start, u, w, kd, decay, born):
    """Returns the state before each chunk, and what its rows add. The first state is zero."""
    return lax.scan(_step, start, (u, w, kd, decay, born))[1]


def _scan_forward(start, u, w, kd, decay, born):
    states, new = _scan(start, u, w, kd, decay, born)
    return (states, new), (start, w, kd, decay, born, states, new)


def _scan_backward(saved, gradients):
    """One scan from behind; the products that need no state are computed for all chunks at once."""
    start, w, kd, decay, born, states, new = saved

    def step(after: Any, x: Any) -> Any:
        w, kd, decay, dstate, dnew = x
        dnew = dnew + dot(kd, after)
        before = decay * after + dstate
        if w is not None:
            before = before - dot(w.swapaxes(-1, -2), dnew)
        return before, (after, dnew)

    dstart, (after, dnew) = lax.scan(step, start, (w, kd, decay, *gradients), reverse=True)
    across = lambda x: x.swapaxes(-1, -2)
    dw = None if w is None else -dot(dnew, across(states))
    ddecay = (states * after).sum(-1, keepdims=True)
    if decay.shape[-2] == 1:
        ddecay = ddecay.sum(-2, keepdims=True)
    dborn = after if born.shape == after.shape else jnp.zeros_like(born)
    return dstart, dnew, dw, dot(new, across(after)), ddecay, dborn


_scan.defvjp(_scan_forward, _scan_backward)


def states_after(
    steps: Steps,
    states: Float[Array, "n G N H V"],
    last: Int32[Array, " P"],
    *,
    entry: Entry | None = None,
) -> Float[Array, "P N H V"]:
    """Returns the state after each piece, from those before the chunks of its last row `last`."""
    chunks = steps.chunks
    end = chunks.place_of(last, jnp.ones(last.shape, bool))
    # A piece that starts in its last chunk is entered there, or starts from zero.
    row = end.row[:, None, None, None]
    state = states[end.where] * jnp.take_along_axis(chunks.into[end.where], row, 2)
    if entry is not None:
        start = chunks.place_of(entry.row, entry.used)
        is_there = (start.where[0] == end.where[0])[:, None, None, None]
        state = jnp.where(is_there, entry.state, state)
    new = steps.u[end.where]
    if steps.w is not None:
        new = new - dot(steps.w[end.where], state)
    decay = jnp.take_along_axis(steps.into[end.where], row, 2)
    added = dot((steps.kd[end.where] * end.mask).swapaxes(-1, -2), new)
    return decay[:, :, 0, :, None] * state + added


def read(
    steps: Steps,
    q: Float[Array, "n G N C H"],
    scores: Float[Array, "n G N C C"],
    entry: Entry | None,
) -> Float[Array, "G L N V"]:
    """Returns what the queries read from the states, which they follow.

    Args:
      steps: how the states change.
      q: queries, decayed from the start of their piece or chunk.
      scores: of each row with the rows of its piece and chunk.
      entry: the pieces that do not start from zero.
    """
    states, new = walk(steps, entry)
    out = dot(q * steps.chunks.into, states) + dot(scores, new)
    if entry is not None:
        at = steps.chunks.place_of(entry.row, entry.used)
        out = out.at[at.where].add(dot(q[at.where], entry.state) * at.mask)
    return steps.chunks.join(out)
