"""The maps of cut pieces: their states from zero, and the products of the maps of their rows.

They are computed only on ranks that have such pieces, and only for the chunks of these.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch.sequence.chunks import Chunks, dot
from jax_cp_dispatch.sequence.recurrence import Ends, Entry
from jax_cp_dispatch.sequence.states import Steps, walk


def states_of_pieces(steps: Steps, ends: Ends) -> Float[Array, "P N H V"]:
    """Returns the state after each piece, from zero; zeros for those that are not used."""
    operands = steps.u, steps.w, steps.kd, steps.into
    return _computed_if(_states, ends.used.any(), (steps.chunks, ends), operands)


def products_of_pieces(steps: Steps, ends: Ends) -> Float[Array, "P N H H"]:
    """Returns the product of the maps of each piece's rows, for those that follow another."""
    ends = ends._replace(used=ends.used & ends.follows)
    operands = steps.w, steps.kd, steps.into
    return _computed_if(_products, ends.used.any(), (steps.chunks, ends), operands)


def _states(fixed: tuple[Chunks, Ends], operands: Any) -> Float[Array, "P N H V"]:
    chunks, ends = fixed
    u, w, kd, into = operands
    steps = Steps(u, w, kd, into, chunks)
    states, _ = walk(steps, active=_active(chunks, ends))
    return _states_after(steps, states, ends.last)


def _products(fixed: tuple[Chunks, Ends], operands: Any) -> Float[Array, "P N H H"]:
    """The state after each piece, from the identity, if its rows add nothing."""
    chunks, ends = fixed
    w, kd, into = operands
    size = kd.shape[-1]
    identity = jnp.where(ends.used[:, None, None, None], jnp.eye(size, dtype=w.dtype), 0)
    identity = jnp.broadcast_to(identity, (len(ends.used), w.shape[2], size, size))
    entry = Entry(ends.first, ends.used, identity)
    steps = Steps(jnp.zeros_like(w), w, kd, into, chunks)
    states, _ = walk(steps, entry, active=_active(chunks, ends))
    return _states_after(steps, states, ends.last, entry=entry)


def _active(chunks: Chunks, ends: Ends) -> Bool[Array, " n"]:
    """Returns which chunks to walk through: the last of a piece is computed apart."""
    return (chunks.between(ends.first, ends.last) & ends.used[:, None]).any(0)


def _states_after(
    steps: Steps,
    states: Float[Array, "n G N H V"],
    last: Int32[Array, " P"],
    *,
    entry: Entry | None = None,
) -> Float[Array, "P N H V"]:
    """Returns the state after each piece, from those before the chunks of its last row `last`."""
    chunks = steps.chunks
    end = chunks.index_of(last, jnp.ones(last.shape, bool))
    # A piece that starts in its last chunk is entered there, or starts from zero.
    row = end.row[:, None, None, None]
    state = states[end.where] * jnp.take_along_axis(chunks.into[end.where], row, 2)
    if entry is not None:
        start = chunks.index_of(entry.first, entry.used)
        is_there = (start.where[0] == end.where[0])[:, None, None, None]
        state = jnp.where(is_there, entry.state, state)
    new = steps.u[end.where]
    if steps.w is not None:
        new = new - dot(steps.w[end.where], state)
    decay = jnp.take_along_axis(steps.into[end.where], row, 2)
    added = dot((steps.kd[end.where] * end.mask).swapaxes(-1, -2), new)
    return decay[:, :, 0, :, None] * state + added


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _computed_if(fn, used, fixed, operands):
    """Returns `fn(fixed, operands)`, or zeros unless `used`; computed again by its derivative.

    So nothing is stored or moved for what is not used. There is no derivative in `fixed`.
    """

    def zeros(fixed, operands):
        out = jax.eval_shape(fn, fixed, operands)
        return vary_like([jnp.zeros(out.shape, out.dtype)], operands[0])[0]

    return lax.cond(used, fn, zeros, fixed, operands)


def _computed_if_forward(fn, used, fixed, operands):
    return _computed_if(fn, used, fixed, operands), (used, fixed, operands)


def _computed_if_backward(fn, saved, gradient):
    used, fixed, operands = saved

    def pull(fixed, operands, gradient):
        return jax.vjp(partial(fn, fixed), operands)[1](gradient)[0]

    def zeros(fixed, operands, gradient):
        return jax.tree.map(lambda x: vary_like([jnp.zeros_like(x)], x)[0], operands)

    return None, None, lax.cond(used, pull, zeros, fixed, operands, gradient)


_computed_if.defvjp(_computed_if_forward, _computed_if_backward)
