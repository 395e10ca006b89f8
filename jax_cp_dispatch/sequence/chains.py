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
from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped

from jax_cp_dispatch._arrays import At, chosen, divided, where_or_zero
from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.movement import move
from jax_cp_dispatch._ranks.options import CollectiveOptions, vary_alike
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.sequence.call_layer import Carried
from jax_cp_dispatch.sequence.chunks import (
    Chunks,
    ChunkSpan,
    Steps,
    across,
    decay_over,
    dot,
    walk,
    walk_back,
)
from jax_cp_dispatch.sequence.pieces import Cuts, Pieces

# What a received row is.
_NONE, _STATE, _MAP = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChainPieces:
    """The cut pieces of this rank, by their slots, and the exchange of their maps.

    A document that continues from another call is cut there, too: if its first piece is here, it is
    one of `later`. One that may continue in the next is cut behind its last piece, which is one of
    `earlier`. The slot of their batch row is free: on this rank, no token of the row comes before
    the one, and none behind the other.
    """

    # Options of the call (static)
    exchange: CollectiveOptions = dataclasses.field(metadata={"static": True})
    pieces: Pieces  # of all ranks
    # Those of this rank that continue earlier ones, and that later ones continue
    later: Cuts
    earlier: Cuts
    opening: Any = None  # which pieces of `later` the initial states enter; None: there are none
    # Behind which pieces of `earlier` the call returns the state; None: behind none
    closing: Any = None

    @classmethod
    def of(cls, exchange: CollectiveOptions, pieces: Pieces, carried: Carried) -> ChainPieces:
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
        return jax.tree.map(lambda x: where_or_zero(self.opening, x), states)

    def ids(self) -> Int32[Array, "G L"]:
        """Returns a number for each row: 0 for padding, 1, ..., P for `later`, more for others."""
        pieces, slot = self.pieces, self.pieces.slots(self.later)
        fresh = where_or_zero(pieces.is_token, pieces.begin + pieces.num_slots + 1)
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

        `states` are after each piece of `earlier` that is the first of its document; the others
        have `maps`, by which `apply` computes the state after a piece from that before. `initial`
        is before the opening pieces, from another call.
        """
        if self.pieces.world_size == 1:
            none = jax.tree.map(jnp.zeros_like, states)
            return none if initial is None else self.initial(initial)
        exchange, shape = self.exchange, self.pieces.chains
        plans, kind, last = _links(self)
        limits: Any = {
            "capacity": shape[0] * shape[1],
            "capacity_name": "PlanConfig.max_linked_pieces",
        }
        sent = outgoing(states, plans[0], fingerprint=self.pieces.fingerprint, **limits)
        received = move(exchange, [sent, outgoing(maps, plans[1], **limits)])
        by_step = lambda x: jnp.moveaxis(x.reshape(*shape, *x.shape[1:]), 1, 0)
        kind, first, others = jax.tree.map(by_step, (kind, *received))

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
        none = vary_alike(none, also=exchange.axis_names)
        after = lax.scan(step, none, (kind, first, others))[1]
        chain, step_of = divided(last, shape[1])
        at = At(jnp.stack([step_of, chain], 1), (0, 1))
        before = jax.tree.map(lambda x: where_or_zero(self.crosses, at.take(x)), after)
        if initial is None:
            return before
        return jax.tree.map(lambda x, y: chosen(self.opening, x, y), initial, before)


def _chosen(use: Bool[Array, " P"], cuts: Cuts, others: Cuts) -> Cuts:
    return Cuts._make(jnp.where(use, *both) for both in zip(cuts, others, strict=True))


def _links(cuts: ChainPieces) -> tuple[list[Metadata], Array, Array]:
    """Finds which maps move, and in which rows they arrive: by documents, in order.

    Returns:
      This rank's views of the metadata of states and of maps; what each received row is, i32
      [rows]; and the row of the predecessor of each of its later pieces, i32 [P].
    """
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
    dst_offset = where_or_zero(moves, jnp.stack([rows, rows])).astype(jnp.uint32)
    plans = [
        Metadata(
            dst_rank=dst_rank[i],
            dst_offset=dst_offset[i],
            seq_len=jnp.ones(num_slots, jnp.uint32),
            num_recv_tokens=counts[i],
            world_size=world_size,
        )
        for i in range(2)
    ]
    num_rows = pieces.chains[0] * pieces.chains[1]
    at = jnp.where(receives, arrival, num_rows).astype(jnp.uint32)
    kinds = jnp.full(num_rows, _NONE, jnp.int32)
    kinds = kinds.at[at].set(jnp.where(is_first, _STATE, _MAP), mode="drop")
    return plans, kinds, jnp.maximum(mine.base + mine.order - 1, 0)


def _follows(earlier: Cuts, later: Cuts) -> Array:
    """Returns which of the later pieces are behind which of the earlier ones, in a document."""
    earlier = Cuts._make(x[:, None] for x in earlier)
    later = Cuts._make(x[None] for x in later)
    same = (earlier.document == later.document) & earlier.used
    return same & (later.order > earlier.order)


# ---- The states of a recurrence in chunks: from chunk to chunk, into and out of cut pieces.
#
# The map of a cut piece goes to the ranks that continue it, and the derivative comes back: that of
# the state behind the piece. So the maps themselves need no derivative: with the states before and
# the derivatives behind its pieces, each rank computes its gradients in one pass from behind.


class Links(NamedTuple):
    """The cut pieces of this rank in chunks."""

    cuts: ChainPieces  # the pieces, and the exchange of their maps
    later: ChunkSpan  # the pieces that continue earlier ones
    earlier: ChunkSpan  # the pieces that later ones continue
    decays: Float[Array, "P N F"] | None  # the maps of `earlier`, if rows read nothing; else None

    @property
    def crosses(self) -> ChunkSpan:
        """The pieces of `later` that states of other ranks enter."""
        return self.later._replace(used=self.cuts.crosses)

    @classmethod
    def of(cls, cuts: ChainPieces | None, chunks: Chunks, decays: Any = None) -> Links | None:
        if cuts is None:
            return None
        later = chunks.span(cuts.later, cuts.later_ids, at_last=False)
        return cls(cuts, later, chunks.span(cuts.earlier, cuts.earlier_ids, at_last=True), decays)

    def behind(self, steps: Steps, states: Array, new: Array, entering: Array) -> _Behind:
        """Returns what the state behind each piece of `earlier` is computed from."""
        at = self.earlier.chunk()
        # A piece that starts in its last chunk is entered there, or starts from zero.
        is_inside = self.earlier.first == self.earlier.last
        before = chosen(is_inside, where_or_zero(self.cuts.follows, entering), at.take(states))
        decay = self.earlier.last_row().take(steps.into)[..., None]
        keys = at.take(steps.kd) * self.earlier.mask
        return _Behind(before, decay, keys, at.take(new), is_inside)


class _Behind(NamedTuple):
    """The state behind a piece is decay * before + keys^T new."""

    before: Float[Array, "P N H V"]
    decay: Float[Array, "P N F 1"]
    keys: Float[Array, "P N C H"]
    new: Float[Array, "P N C V"]
    is_inside: Bool[Array, " P"]

    def state(self) -> Float[Array, "P N H V"]:
        return self.decay * self.before + dot(across(self.keys), self.new)


def read(
    steps: Steps,
    q: Float[Array, "n G N C H"],
    scores: Float[Array, "n G N C C"],
    chunks: Chunks,
    links: Links | None,
    initial: Float[Array, "P N H V"] | None = None,
) -> tuple[Float[Array, "G L N V"], Float[Array, "P N H V"] | None]:
    """Returns what queries read, and the state behind each closing piece, if there are any.

    Queries read from the states, and by their scores from rows of their chunk. They are decayed
    from the start of their piece or chunk. `initial` are the states before the opening pieces.
    """
    states, new, entering, behind = _carry((chunks, links), steps, initial)
    out = dot(q * chunks.into, states) + dot(scores, new)
    if links is not None:
        at = links.later.chunk()
        out = at.add(out, dot(at.take(q), entering) * links.later.mask)
    return chunks.join(out), behind


@jax.custom_vjp
def _carry(
    fixed: tuple[Chunks, Links | None], steps: Steps, initial: Any
) -> tuple[Array, Array, Any, Any]:
    """Returns the state before each chunk, what its rows add, and the states that enter pieces.

    The last result is the states behind pieces of `earlier`, if some of these are closing ones.
    """
    return _carry_forward(fixed, steps, initial)[0]


def _carry_forward(fixed, steps, initial):
    chunks, links = fixed
    later = entering = pull = behind = None
    if links is not None:
        later = links.later
        product, added = _maps(steps, chunks, links, initial)
        apply = _decayed if steps.w is None else _multiplied
        before = lambda added: links.cuts.states_before(added, (product, added), apply, initial)
        entering, pull = jax.vjp(before, added)
    states, new = walk(steps, chunks, later, entering)
    if links is not None and links.cuts.closing is not None:
        behind = links.behind(steps, states, new, entering).state()
    saved = fixed, steps._replace(u=None), states, new, entering, pull, initial
    return (states, new, entering, behind), saved


def _carry_backward(saved, gradients):
    (chunks, links), steps, states, new, entering, pull, initial = saved
    dstates, dnew, dentering, dbehind = gradients
    dkd = dinto = dinitial = 0
    if links is not None:
        at, crosses = links.earlier.chunk(), links.crosses
        behind = links.behind(steps, states, new, entering)
        enters = behind.is_inside & links.cuts.follows
        if links.cuts.closing is not None:  # first: it is no part of the maps
            dbehind = where_or_zero(links.cuts.closing, dbehind)
            dnew, dstates = _add_behind(at, behind, dbehind, dnew, dstates)
            dentering = dentering + where_or_zero(enters, behind.decay * dbehind)
        active = crosses.is_active(len(chunks.ids))
        # What enters, without what goes on behind the pieces.
        back = lambda: walk_back(steps, chunks, dstates, dnew, active=active)
        of_rows = lambda: _at_entrance(steps, links, *back())
        (g,) = pull(dentering + _if_any(crosses.used, of_rows, dentering))
        if initial is not None:
            dinitial = dentering + where_or_zero(enters, behind.decay * g)
        dnew, dstates = _add_behind(at, behind, g, dnew, dstates)
        if links.cuts.closing is not None:
            g = g + dbehind
        dkd = links.earlier.mask * dot(behind.new, across(g))
        dinto = _like_decay(steps, behind.before * g)
    after, dnew = walk_back(steps, chunks, dstates, dnew)
    if links is not None and initial is not None:
        dinitial = links.cuts.initial(dinitial + _at_entrance(steps, links, after, dnew))
    dw = None if steps.w is None else -dot(dnew * chunks.into, across(states))
    of_keys = dot(new * chunks.last, across(after))
    last_row = _like_decay(steps, states * after) * chunks.into[..., -1, :]
    if links is not None:
        of_keys = links.earlier.chunk().add(of_keys, dkd)
        at, mask = links.later.chunk(), links.later.mask
        of_remains = _like_decay(steps, at.take(after) * entering) * mask[:, :, -1]
        last_row = at.add(last_row, of_remains)
        if dw is not None:
            dw = at.add(dw, -dot(at.take(dnew) * mask, across(entering)))
    above = [(0, 0)] * 3 + [(chunks.size - 1, 0), (0, 0)]
    into = jnp.pad(last_row[..., None, :], above)
    if links is not None:
        into = links.earlier.last_row().add(into, dinto)
    return None, Steps(dnew, dw, of_keys, into), None if initial is None else dinitial


_carry.defvjp(_carry_forward, _carry_backward)


def _maps(steps: Steps, chunks: Chunks, links: Links, initial: Any) -> tuple[Any, Array]:
    """Returns the maps of `earlier`, from S to product S + added, by walks through their chunks.

    If rows read, the product is the state from the identity if rows add nothing. An initial state
    is part of what an opening piece adds.
    """
    earlier, follows = links.earlier, links.cuts.earlier.start > 0
    size, lead = steps.kd.shape[-1], (len(follows), steps.u.shape[2])

    def behind(used: Array, steps: Steps, entering: Array, later: ChunkSpan | None) -> Array:
        active = earlier._replace(used=used).is_active(len(chunks.ids))

        def walked() -> Array:
            states, new = walk(steps, chunks, later, entering, active=active)
            return links.behind(steps, states, new, entering).state()

        entering = vary_alike(entering, like=steps.u)
        return _if_any(used, walked, entering)

    zero = jnp.zeros((*lead, size, steps.u.shape[-1]), steps.u.dtype)
    zero = vary_alike(zero, like=steps.u)  # as its cotangent does
    if links.cuts.pieces.world_size == 1:
        return links.decays if steps.w is None else zero, zero
    sends = links.cuts.sends
    if initial is None:
        added = behind(sends, steps, zero, None)
    else:
        added = behind(sends, steps, links.cuts.initial(initial), links.later)
    if steps.w is None:
        return links.decays, added
    identity = jnp.broadcast_to(np.eye(size, dtype=zero.dtype), (*lead, size, size))
    adds_nothing = steps._replace(u=jnp.zeros_like(steps.w))
    return behind(sends & follows, adds_nothing, identity, links.later), added


def _add_behind(at: At, behind: _Behind, g: Array, dnew: Array, dstates: Array) -> Any:
    """Adds the gradient of the states behind pieces to those of what they are computed from."""
    dnew = at.add(dnew, dot(behind.keys, g))
    return dnew, at.add(dstates, where_or_zero(~behind.is_inside, behind.decay * g))


def _at_entrance(steps: Steps, links: Links, after: Array, dnew: Array) -> Array:
    """Returns the gradient of entering states from those of `walk_back`."""
    at, mask = links.later.chunk(), links.later.mask
    out = at.take(decay_over(steps)) * mask[:, :, -1:] * at.take(after)
    if steps.w is not None:
        out = out - dot(across(at.take(steps.w) * mask), at.take(dnew))
    return out


def _if_any(used: Bool[Array, " P"], fn: Callable[[], Array], like: Array) -> Array:
    """Returns `fn()`, or zeros if there is none.

    In `fn`, no array may begin to vary over mesh axes: `jax.vmap` computes both branches, of
    operands that do already, constant arrays among them.
    """
    zeros = lambda: vary_alike(jnp.zeros_like(like), like=like)
    return lax.cond(used.any(), fn, zeros)


def _like_decay(steps: Steps, x: Float[Array, "... H V"]) -> Float[Array, "... F"]:
    """Sums what belongs to one decay."""
    x = x.sum(-1)
    return x.sum(-1, keepdims=True) if steps.into.shape[-1] == 1 else x


def _multiplied(map_: Any, state: Any) -> Any:
    product, added = map_
    return dot(product, state) + added


def _decayed(map_: Any, state: Any) -> Any:
    decay, added = map_
    return decay[..., None] * state + added
