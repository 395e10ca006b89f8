"""The exchange of maps: each piece learns the state that enters it, from the pieces before it.

The map of a piece goes to every rank that holds a later piece of its document; a first piece sends
its state instead. A receiver applies them in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.exchange import move
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.sequence.pieces import Cuts, Pieces

# What a received row is.
_NONE, _STATE, _MAP = range(3)


def states_before(
    exchange: CollectiveOptions,
    pieces: Pieces,
    states: PyTree[Shaped[Array, "P ..."]],
    maps: PyTree[Shaped[Array, "P ..."]],
    apply: Callable[[Any, Any], Any],
) -> PyTree[Shaped[Array, "Q ..."]]:
    """Returns the state before each piece of `pieces.later`, in one exchange.

    Args:
      exchange: options of the call.
      pieces: of this rank.
      states: after each piece of `pieces.earlier` that is the first of its document.
      maps: of the others.
      apply: returns the state after a piece, from its map and the state before.
    """
    links = _links(pieces)
    shape = pieces.chains
    parts = []
    for name, arrays, metadata in (("states", states, links.first), ("maps", maps, links.others)):
        part = outgoing(exchange.op, name, arrays, metadata, capacity=shape[0] * shape[1])
        parts.append(part._replace(capacity_name="PlacementConfig.max_linked_pieces"))
    if pieces.fingerprint is not None:
        parts[0] = parts[0]._replace(fingerprint=pieces.fingerprint)
    received = move(exchange, parts)
    by_step = lambda x: jnp.moveaxis(x.reshape(*shape, *x.shape[1:]), 1, 0)
    kind, first, others = jax.tree.map(by_step, (links.kind, *received))

    def step(state: Any, x: Any) -> Any:
        kind, first, map_ = x
        applied = lax.cond(
            (kind == _MAP).any(), jax.vmap(apply), lambda map_, state: state, map_, state
        )

        def chosen(first: Any, applied: Any, state: Any) -> Any:
            of_chain = kind.reshape(-1, *[1] * (state.ndim - 1))
            later = jnp.where(of_chain == _MAP, applied, state)
            return jnp.where(of_chain == _STATE, first, later)

        state = jax.tree.map(chosen, first, applied, state)
        return state, state

    none = jax.tree.map(lambda x: jnp.zeros_like(x[0]), first)
    leaves, tree = jax.tree.flatten(none)
    none = tree.unflatten(vary_alike(leaves, also=exchange.axis_names))
    after = lax.scan(step, none, (kind, first, others))[1]
    used = pieces.own_later.used

    def entering(x: Any) -> Any:
        of_piece = used.reshape(-1, *[1] * (x.ndim - 2))
        return jnp.where(of_piece, x[links.last % shape[1], links.last // shape[1]], 0)

    return jax.tree.map(entering, after)


class _Links(NamedTuple):
    """What this rank sends and receives.

    Attributes:
      first, others: its views of the metadata of states and of maps.
      kind: i32 [rows]; what each received row is.
      last: i32 [P]; the row of the predecessor of each of its later pieces.
    """

    first: Metadata
    others: Metadata
    kind: Array
    last: Array


def _links(pieces: Pieces) -> _Links:
    """Finds which maps move, and in which rows they arrive: by documents, in order."""
    own, mine = pieces.own_earlier, pieces.own_later
    world_size, num_slots = pieces.world_size, pieces.num_slots
    follows = _follows(own, pieces.later)  # [P, later]
    to = jnp.broadcast_to(pieces.later.rank, follows.shape)
    slot = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    row = jnp.where(follows, pieces.later.base + own.order[:, None], -1)
    rows = jnp.full((num_slots, world_size), -1, jnp.int32).at[slot, to].max(row)
    arriving = _follows(pieces.earlier, mine)  # [earlier, P]
    arrival = jnp.where(arriving, mine.base + pieces.earlier.order[:, None], -1).max(1)
    receives, is_first = arrival >= 0, pieces.earlier.start == 0

    def metadata(sent: Array, received: Array) -> Metadata:
        counts = jnp.zeros(world_size, jnp.int32)
        counts = counts.at[pieces.earlier.rank].add(received.astype(jnp.int32))
        moves = (rows >= 0) & sent[:, None]
        return Metadata(
            dst_rank=jnp.where(moves, np.arange(world_size, dtype=np.int32), -1),
            dst_offset=jnp.where(moves, rows, 0).astype(jnp.uint32),
            seq_len=jnp.ones(num_slots, jnp.uint32),
            num_recv_tokens=jnp.append(counts, counts.sum()).astype(jnp.uint32),
            world_size=world_size,
        )

    num_rows = pieces.chains[0] * pieces.chains[1]
    kinds = jnp.full(num_rows, _NONE, jnp.int32)
    kinds = kinds.at[jnp.where(receives, arrival, num_rows)].set(
        jnp.where(is_first, _STATE, _MAP), mode="drop"
    )
    return _Links(
        metadata(own.start == 0, receives & is_first),
        metadata(own.start > 0, receives & ~is_first),
        kinds,
        jnp.maximum(mine.base + mine.order - 1, 0),
    )


def _follows(earlier: Cuts, later: Cuts) -> Array:
    """Returns which of the later pieces are behind which of the earlier ones, in a document."""
    earlier = Cuts._make(x[:, None] for x in earlier)
    same = (earlier.document == later.document) & earlier.used
    return same & (later.order > earlier.order)
