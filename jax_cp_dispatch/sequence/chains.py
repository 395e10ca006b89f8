"""The exchange of maps: each piece learns the state that enters it, from the pieces before it.

The map of a piece goes to every rank that holds a later piece of its document; a first piece sends
its state instead. A receiver applies them in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, PyTree, Shaped

from jax_cp_dispatch._arrays import At, chosen, divided, only_where
from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.exchange import move
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.sequence.carried import Carried
from jax_cp_dispatch.sequence.pieces import Cuts, Pieces

NOTHING = Carried()
# What a received row is.
_NONE, _STATE, _MAP = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CutPieces:
    """The cut pieces of this rank, by their slots, and the exchange of their maps.

    A document that continues from another call is cut there, too: if its first piece is here, it is
    one of `later`. One that may continue in the next is cut behind its last piece, which is one of
    `earlier`. The slot of their batch row is free: on this rank, no token of the row comes before
    the one, and none behind the other.

    Attributes:
      exchange: options of the call (static).
      pieces: of all ranks.
      later, earlier: those of this rank that continue earlier ones, and that later ones continue.
      opening: which pieces of `later` the initial states enter; None: there are none.
      closing: behind which pieces of `earlier` the call returns the state; None: behind none.
    """

    exchange: CollectiveOptions = dataclasses.field(metadata={"static": True})
    pieces: Pieces
    later: Cuts
    earlier: Cuts
    opening: Any = None
    closing: Any = None

    @classmethod
    def of(
        cls, exchange: CollectiveOptions, pieces: Pieces, carried: Carried = NOTHING
    ) -> CutPieces:
        later, earlier = pieces.own_later, pieces.own_earlier
        opening = closing = None
        if carried.initial is not None:
            first = pieces.row_ends.first_piece(pieces)
            opening = first.used & (first.start == 0)
            later = _chosen(opening, first, later)
        if carried.is_returned:
            last = pieces.row_ends.closing_piece(pieces)
            closing = last.used
            earlier = _chosen(closing, last, earlier)
        return cls(exchange, pieces, later, earlier, opening, closing)

    @property
    def follows(self) -> Bool[Array, " P"]:
        """Whether a piece of `earlier` also continues one: it is that of `later` with its slot."""
        if self.opening is None:
            return self.earlier.start > 0
        is_same = self.earlier.used & (self.earlier.row == self.later.row)
        return (self.earlier.start > 0) | (self.opening & is_same)

    @property
    def crosses(self) -> Bool[Array, " P"]:
        """Which pieces of `later` are entered by a state that other ranks send."""
        return self.later.used if self.opening is None else self.later.used & ~self.opening

    @property
    def sends(self) -> Bool[Array, " P"]:
        """Behind which pieces of `earlier` other ranks need the state."""
        return self.earlier.used if self.closing is None else self.earlier.used & ~self.closing

    def initial(self, states: PyTree[Shaped[Array, "P ..."]]) -> PyTree[Shaped[Array, "P ..."]]:
        """Returns the initial states where they enter, and zeros elsewhere."""
        return jax.tree.map(lambda x: only_where(self.opening, x), states)

    def ids(self) -> Int32[Array, "G L"]:
        """Returns a number for each row: 0 for padding, 1, ..., P for `later`, more for others."""
        pieces, slot = self.pieces, self.pieces.slots(self.later)
        fresh = only_where(pieces.is_token, pieces.begin + pieces.num_slots + 1)
        return chosen(slot > 0, slot, fresh)

    @property
    def later_ids(self) -> Int32[Array, " P"]:
        return jnp.arange(1, 1 + self.pieces.num_slots, dtype=jnp.int32)

    @property
    def earlier_ids(self) -> Int32[Array, " P"]:
        fresh = self.earlier.row + self.pieces.num_slots + 1
        return jnp.where(self.follows, self.later_ids, fresh)

    def states_before(
        self,
        states: PyTree[Shaped[Array, "P ..."]],
        maps: PyTree[Shaped[Array, "P ..."]],
        apply: Callable[[Any, Any], Any],
        initial: PyTree[Shaped[Array, "P ..."]] | None = None,
    ) -> PyTree[Shaped[Array, "P ..."]]:
        """Returns the state before each piece of `later`, in one exchange.

        Args:
          states: after each piece of `earlier` that is the first of its document.
          maps: of the others.
          apply: returns the state after a piece, from its map and the state before.
          initial: before the opening pieces, from another call.
        """
        if self.pieces.world_size == 1:
            none = jax.tree.map(jnp.zeros_like, states)
            return none if initial is None else self.initial(initial)
        received = self._received(states, maps, apply)
        if initial is None:
            return received
        return jax.tree.map(lambda x, y: chosen(self.opening, x, y), initial, received)

    def _received(self, states: Any, maps: Any, apply: Callable[[Any, Any], Any]) -> Any:
        exchange, pieces = self.exchange, self.pieces
        links = _links(self)
        shape = pieces.chains
        parts = []
        sent = ("states", states, links.first), ("maps", maps, links.others)
        for name, arrays, metadata in sent:
            part = outgoing(exchange.op, name, arrays, metadata, capacity=shape[0] * shape[1])
            parts.append(part._replace(capacity_name="PlanConfig.max_linked_pieces"))
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

            def after(first: Any, applied: Any, state: Any) -> Any:
                later = chosen(kind == _MAP, applied, state)
                return chosen(kind == _STATE, first, later)

            state = jax.tree.map(after, first, applied, state)
            return state, state

        none = jax.tree.map(lambda x: jnp.zeros_like(x[0]), first)
        leaves, tree = jax.tree.flatten(none)
        none = tree.unflatten(vary_alike(leaves, also=exchange.axis_names))
        after = lax.scan(step, none, (kind, first, others))[1]
        chain, step_of = divided(links.last, shape[1])
        at = At(jnp.stack([step_of, chain], 1), (0, 1))
        return jax.tree.map(lambda x: only_where(self.crosses, at.take(x)), after)


def _chosen(use: Bool[Array, " P"], cuts: Cuts, others: Cuts) -> Cuts:
    return Cuts._make(jnp.where(use, *both) for both in zip(cuts, others, strict=True))


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


def _links(cuts: CutPieces) -> _Links:
    """Finds which maps move, and in which rows they arrive: by documents, in order."""
    pieces, own, mine = cuts.pieces, cuts.earlier, cuts.later
    world_size, num_slots = pieces.world_size, pieces.num_slots
    follows = _follows(own, pieces.later)  # [P, later]
    to = jnp.broadcast_to(pieces.later.rank, follows.shape)
    slot = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    row = jnp.where(follows, pieces.later.base[None] + own.order[:, None], -1)
    rows = jnp.full((num_slots, world_size), -1, jnp.int32).at[slot, to].max(row)
    arriving = _follows(pieces.earlier, mine)  # [earlier, P]
    arrival = jnp.where(arriving, mine.base[None] + pieces.earlier.order[:, None], -1).max(1)
    receives, is_first = arrival >= 0, pieces.earlier.start == 0
    sent = jnp.stack([own.start == 0, own.start > 0])
    received = jnp.stack([receives & is_first, receives & ~is_first]).astype(jnp.uint32)
    counts = jnp.zeros((2, world_size), jnp.uint32)
    counts = counts.at[:, pieces.earlier.rank.astype(jnp.uint32)].add(received)
    counts = jnp.concatenate([counts, counts.sum(1, keepdims=True, dtype=jnp.uint32)], 1)
    moves = (rows >= 0)[None] & sent[..., None]
    dst_rank = jnp.where(moves, np.arange(world_size, dtype=np.int32)[None, None], -1)
    dst_offset = only_where(moves, jnp.stack([rows, rows])).astype(jnp.uint32)
    first, others = (
        Metadata(
            dst_rank=dst_rank[i],
            dst_offset=dst_offset[i],
            seq_len=jnp.ones(num_slots, jnp.uint32),
            num_recv_tokens=counts[i],
            world_size=world_size,
        )
        for i in range(2)
    )
    num_rows = pieces.chains[0] * pieces.chains[1]
    at = jnp.where(receives, arrival, num_rows).astype(jnp.uint32)
    kinds = (
        jnp.full(num_rows, _NONE, jnp.int32)
        .at[at]
        .set(jnp.where(is_first, _STATE, _MAP), mode="drop")
    )
    return _Links(first, others, kinds, jnp.maximum(mine.base + mine.order - 1, 0))


def _follows(earlier: Cuts, later: Cuts) -> Array:
    """Returns which of the later pieces are behind which of the earlier ones, in a document."""
    earlier = Cuts._make(x[:, None] for x in earlier)
    later = Cuts._make(x[None] for x in later)
    same = (earlier.document == later.document) & earlier.used
    return same & (later.order > earlier.order)
