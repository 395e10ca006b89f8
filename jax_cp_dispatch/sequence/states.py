"""The states of a recurrence in chunks: from chunk to chunk, into and out of cut pieces.

The map of a cut piece goes to the ranks that continue it, and the derivative comes back: that of
the state behind the piece. So the maps themselves need no derivative: with the states before and
the derivatives behind its pieces, each rank computes its gradients in one pass from behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jax_cp_dispatch._arrays import At, chosen, only_where
from jax_cp_dispatch._ranks.varying import vary_like
from jax_cp_dispatch.sequence.chains import CutPieces
from jax_cp_dispatch.sequence.chunks import Chunks, Span, dot
from jax_cp_dispatch.sequence.walks import Steps, across, decay_over, walk, walk_back


class Links(NamedTuple):
    """The cut pieces of this rank.

    Attributes:
      cuts: their exchange.
      later: in chunks, those that continue earlier ones.
      earlier: those that later ones continue.
      decays: of the latter, if rows read nothing: then they are their maps.
    """

    cuts: CutPieces
    later: Span
    earlier: Span
    decays: Float[Array, "P N F"] | None

    @property
    def crosses(self) -> Span:
        """Those of `later` that states of other ranks enter."""
        return self.later._replace(used=self.cuts.crosses)

    @classmethod
    def of(cls, cuts: CutPieces | None, chunks: Chunks, decays: Any = None) -> Links | None:
        if cuts is None:
            return None
        later = chunks.span(cuts.later, cuts.later_ids, at_last=False)
        return cls(cuts, later, chunks.span(cuts.earlier, cuts.earlier_ids, at_last=True), decays)

    def behind(self, steps: Steps, states: Array, new: Array, entering: Array) -> _Behind:
        """Returns what the state behind each piece of `earlier` is computed from."""
        at = self.earlier.chunk()
        # A piece that starts in its last chunk is entered there, or starts from zero.
        is_inside = self.earlier.first == self.earlier.last
        before = chosen(is_inside, only_where(self.cuts.follows, entering), at.take(states))
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
    """Returns what queries read: from the states, and by their scores with rows of their chunk.

    And the state behind each closing piece, if there are any. Queries are decayed from the start of
    their piece or chunk. `initial`: before the opening pieces.
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

    And those behind pieces of `earlier`, for the closing ones.
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
            dbehind = only_where(links.cuts.closing, dbehind)
            dnew, dstates = _add_behind(at, behind, dbehind, dnew, dstates)
            dentering = dentering + only_where(enters, behind.decay * dbehind)
        active = crosses.is_active(len(chunks.ids))
        of_rows = lambda: _entering_gradient(steps, chunks, links, active, dstates, dnew)
        (g,) = pull(dentering + _if_any(crosses.used, of_rows, dentering))
        if initial is not None:
            dinitial = dentering + only_where(enters, behind.decay * g)
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
    """Returns the maps of `earlier`, from S to product S + added: of walks where there are any.

    If rows read, the product is the state from the identity if rows add nothing. An initial state
    is part of what an opening piece adds.
    """
    earlier, follows = links.earlier, links.cuts.earlier.start > 0
    size, lead = steps.kd.shape[-1], (len(follows), steps.u.shape[2])

    def behind(used: Array, steps: Steps, entering: Array, later: Span | None) -> Array:
        active = earlier._replace(used=used).is_active(len(chunks.ids))

        def walked() -> Array:
            states, new = walk(steps, chunks, later, entering, active=active)
            return links.behind(steps, states, new, entering).state()

        (entering,) = vary_like([entering], steps.u)
        return _if_any(used, walked, entering)

    zero = jnp.zeros((*lead, size, steps.u.shape[-1]), steps.u.dtype)
    (zero,) = vary_like([zero], steps.u)  # as its cotangent does
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
    return dnew, at.add(dstates, only_where(~behind.is_inside, behind.decay * g))


def _entering_gradient(steps, chunks, links, active, dstates, dnew):
    """Returns the gradient of the states that enter, without what goes on behind their pieces."""
    return _at_entrance(steps, links, *walk_back(steps, chunks, dstates, dnew, active=active))


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
    zeros = lambda: vary_like([jnp.zeros_like(like)], like)[0]
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
