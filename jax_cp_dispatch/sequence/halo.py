"""The rows next to a cut: which rows of which rank come before or after each of its pieces."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.exchange import move
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.sequence.pieces import Cuts, Pieces

_FAR = 2**30


def receive_halo(
    exchange: CollectiveOptions,
    pieces: Pieces,
    rows: PyTree[Shaped[Array, "rows ..."]],
    width: int,
    *,
    after: bool = False,
    shifted: bool = False,
) -> PyTree[Shaped[Array, "P width ..."]]:
    """Returns the `width` tokens before each piece of `pieces.later`, in one exchange.

    Tokens that the document does not have are zero. Linear in `rows`.

    Args:
      exchange: options of the call.
      pieces: of this rank.
      rows: all rows of this rank.
      width: tokens, at least 1.
      after: instead, the tokens after each piece of `pieces.earlier`.
      shifted: move only those that a shift by `width` moves into the piece; others are zero.
    """
    metadata = _metadata(pieces, width, after, shifted)
    to = pieces.num_slots
    part = outgoing(exchange.op, "rows", rows, metadata, capacity=to * width)
    if pieces.fingerprint is not None:
        part = part._replace(fingerprint=pieces.fingerprint)
    (received,) = move(exchange, [part])
    return jax.tree.map(lambda x: x.reshape(to, width, *x.shape[1:]), received)


def _metadata(pieces: Pieces, width: int, after: bool, shifted: bool) -> Metadata:
    """Returns this rank's view: slots for its pieces and the pieces that need rows of them."""
    senders, targets = pieces.earlier, pieces.later
    own, mine = pieces.own_earlier, pieces.own_later
    if after:
        senders, targets, own, mine = targets, senders, mine, own
    window = _Window(width, after, shifted)
    # Between a row and a piece that needs it are fewer than `width` tokens.
    nearest = min((width - 1) // pieces.min_tokens + 1, len(targets.row))
    needed = window.needed(own, targets)
    target = jax.lax.top_k(-needed.distance, nearest)[1]  # [P, nearest]
    first, tokens = (jnp.take_along_axis(x, target, 1) for x in (needed.first, needed.tokens))
    origin = (targets.end if after else targets.start - width)[target]
    moves = tokens > 0
    by_sender = window.needed(senders, mine).tokens.sum(1, dtype=jnp.int32)
    received = jnp.zeros(pieces.world_size, jnp.int32).at[senders.rank].add(by_sender)

    def slots(x: Array) -> Array:
        return jnp.where(moves, x, 0).reshape(-1).astype(jnp.uint32)

    return Metadata(
        dst_rank=jnp.where(moves, targets.rank[target], -1).reshape(-1),
        dst_offset=slots(targets.slot[target] * width + first - origin),
        seq_len=slots(tokens),
        src_offset=slots(own.row[:, None] + first - own.start[:, None]),
        num_recv_tokens=jnp.append(received, received.sum(dtype=jnp.int32)).astype(jnp.uint32),
        world_size=pieces.world_size,
    )


class _Needed(NamedTuple):
    """What each target needs of each sender: [senders, targets]."""

    distance: Array  # tokens between their starts; `_FAR` if it needs nothing
    first: Array  # in the document
    tokens: Array


class _Window(NamedTuple):
    """The tokens that a piece needs; see `receive_halo`."""

    width: int
    after: bool
    shifted: bool

    def needed(self, senders: Cuts, targets: Cuts) -> _Needed:
        """Compares pieces [senders] with pieces [targets]."""
        senders = Cuts._make(x[:, None] for x in senders)
        targets = Cuts._make(x[None] for x in targets)
        if self.after:
            low, high = targets.end, targets.end + self.width
            if self.shifted:
                low = jnp.maximum(low, targets.start + self.width)
            distance = senders.start - targets.start
        else:
            low, high = targets.start - self.width, targets.start
            if self.shifted:
                high = jnp.minimum(high, targets.end - self.width)
            distance = targets.start - senders.start
        is_linked = (senders.document == targets.document) & senders.used & (distance > 0)
        first = jnp.maximum(senders.start, low)
        tokens = jnp.maximum(jnp.minimum(senders.end, high) - first, 0)
        return _Needed(jnp.where(is_linked, distance, _FAR), first, jnp.where(is_linked, tokens, 0))
