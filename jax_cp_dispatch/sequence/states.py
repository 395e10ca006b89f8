"""The states of a recurrence in chunks: from chunk to chunk, and into cut pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jax_cp_dispatch._ranks.varying import vary_alike, vary_like
from jax_cp_dispatch.sequence.chunks import Chunks, dot
from jax_cp_dispatch.sequence.recurrence import Entry


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


class Prepared(NamedTuple):
    """What needs no state.

    Attributes:
      steps: how the state changes.
      q: queries, decayed from the start of their piece or chunk.
      scores: of each row with the rows of its piece and chunk.
      dtype: of the outputs.
    """

    steps: Steps
    q: Float[Array, "n G N C H"]
    scores: Float[Array, "n G N C C"]
    dtype: Any


def walk(
    steps: Steps, entry: Entry | None = None, *, active: Bool[Array, " n"] | None = None
) -> tuple[Float[Array, "n G N H V"], Any]:
    """Walks through the chunks, in all groups and heads together.

    Args:
      steps: of every chunk.
      entry: the pieces that do not start from zero.
      active: the chunks behind which states are needed; others are skipped.
    Returns:
      The state before each chunk, and what its rows add.
    """
    u, w, kd, into, chunks = steps
    decay = (into * chunks.into)[..., -1, :, None]
    shape = *kd.shape[1:3], kd.shape[-1], u.shape[-1]
    where, born = jnp.zeros((2, 0), jnp.int32), jnp.zeros((0, *shape[1:]), u.dtype)
    if entry is not None:
        at = chunks.index_of(entry.first, entry.used)
        if steps.w is not None:
            u = u.at[at.where].add(-dot(steps.w[at.where], entry.state) * at.mask)
        remains = at.mask[:, :, -1] * into[at.where][:, :, -1]  # of pieces that reach the end
        where, born = jnp.stack(at.where), remains[..., None] * entry.state
    fixed = where, active, chunks.into, chunks.last
    changing = jnp.zeros(shape, u.dtype), u, w, kd, decay, born
    leaves, tree = jax.tree.flatten((fixed, changing))
    return _scan(*tree.unflatten(vary_alike(leaves)))


@jax.custom_vjp
def _scan(fixed, changing):
    """Returns the state before each chunk, and what its rows add. The first state is zero.

    The states `born` [P, N, H, V] are added behind the chunks and in the groups of `where` [2, P].
    """
    start, u, w, kd, decay, born = changing
    where, active, into, last = fixed
    chunk, group = where

    def step(state: Any, x: Any) -> Any:
        index, u, w, kd, decay, into, last = x
        new = u if w is None else u - dot(w * into, state)
        after = decay * state + dot((kd * last).swapaxes(-1, -2), new)
        if len(born):
            here = chunk == index
            mine = jnp.where(here[:, None, None, None], born, 0)
            after = lax.cond(here.any(), lambda x: x.at[group].add(mine), lambda x: x, after)
        return after, (state, new)

    def skip(state: Any, x: Any) -> Any:
        return state, (state, jnp.zeros_like(x[1]))

    return _scan_active(step, skip, active, start, (u, w, kd, decay, into, last))[1]


def _scan_active(step, skip, active, start, xs, *, reverse=False):
    """Scans over chunks and skips those that are not active; `step` gets the index too."""
    # In a branch nothing begins to vary: `jax.vmap` computes both, of operands that do already.
    first = jax.tree.leaves(xs)[0]
    xs = *vary_like([jnp.arange(len(first), dtype=jnp.int32)], first), *xs
    if active is None:
        return lax.scan(step, start, xs, reverse=reverse)
    chosen = lambda state, x: lax.cond(x[0], step, skip, state, x[1])
    return lax.scan(chosen, start, (active, xs), reverse=reverse)


def _scan_forward(fixed, changing):
    states, new = _scan(fixed, changing)
    start, _, w, kd, decay, _ = changing
    return (states, new), (fixed, start, w, kd, decay, states, new)


def _scan_backward(saved, gradients):
    """One scan from behind; the products that need no state are computed for all chunks at once."""
    fixed, start, w, kd, decay, states, new = saved
    where, active, into, last = fixed

    def step(after: Any, x: Any) -> Any:
        _, w, kd, decay, into, last, dstate, dnew = x
        dnew = dnew + dot(kd * last, after)
        before = decay * after + dstate
        if w is not None:
            before = before - dot((w * into).swapaxes(-1, -2), dnew)
        return before, (after, dnew)

    def skip(after: Any, x: Any) -> Any:
        return after + x[-2], (jnp.zeros_like(after), jnp.zeros_like(x[-1]))

    xs = (w, kd, decay, into, last, *gradients)
    dstart, (after, dnew) = _scan_active(step, skip, active, start, xs, reverse=True)
    across = lambda x: x.swapaxes(-1, -2)
    dw = None if w is None else -dot(dnew * into, across(states))
    dkd = dot(new * last, across(after))
    ddecay = (states * after).sum(-1, keepdims=True)
    if decay.shape[-2] == 1:
        ddecay = ddecay.sum(-2, keepdims=True)
    return None, (dstart, dnew, dw, dkd, ddecay, after[tuple(where)])


_scan.defvjp(_scan_forward, _scan_backward)


def read(prepared: Prepared, entry: Entry | None) -> Float[Array, "G L N V"]:
    """Returns what the queries read from the states; `entry`: pieces that do not start from zero"""
    steps, q, scores, dtype = prepared
    states, new = walk(steps, entry)
    out = dot(q * steps.chunks.into, states) + dot(scores, new)
    if entry is not None:
        at = steps.chunks.index_of(entry.first, entry.used)
        out = out.at[at.where].add(dot(q[at.where], entry.state) * at.mask)
    return steps.chunks.join(out).astype(dtype)
