"""Layers that need the rows next to a cut: `shift`, `shift_documents`, `causal_conv`."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, check_integer, check_value_of
from jax_cp_dispatch._arrays import chosen, run_ends, sum_dtype, where_or_zero
from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.movement import move
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.options import CollectiveOptions, varying_axes
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import read_given_tokens
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS
from jax_cp_dispatch.documents.table import from_segment_ids
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.sequence.call_layer import (
    Carried,
    Layer,
    LayerOptions,
    call_layer,
    check_state,
    exchange_of,
)
from jax_cp_dispatch.sequence.pieces import Cuts, Pieces

# ---- The rows next to a cut: which rows of which rank come before or after each of its pieces.

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

    Or, if `after`, those after each piece of `pieces.earlier`; if `shifted`, only those that a
    shift by `width` moves into the piece. Others, and tokens that the document does not have, are
    zero. Linear in `rows`, which are all of this rank.
    """
    metadata = halo_metadata(pieces, width, after, shifted)
    to = pieces.num_slots
    part = outgoing(rows, metadata, capacity=to * width, fingerprint=pieces.fingerprint)
    (moved,) = move(exchange, [part])
    return jax.tree.map(lambda x: x.reshape(to, width, *x.shape[1:]), moved)


def halo_metadata(pieces: Pieces, width: int, after: bool, shifted: bool) -> Metadata:
    """Returns this rank's view of the exchange; its slots are its pieces' rows for other pieces."""
    senders, targets = pieces.earlier, pieces.later
    own, mine = pieces.own_earlier, pieces.own_later
    if after:
        senders, targets, own, mine = targets, senders, mine, own
    # Between a row and a piece that needs it are fewer than `width` tokens.
    nearest = min((width - 1) // pieces.min_tokens + 1, len(targets.row))
    distance, *needed = _needed(own, targets, width, after, shifted)
    target = jax.lax.top_k(-distance, nearest)[1]  # [P, nearest]
    first, tokens = (jnp.take_along_axis(x, target, 1) for x in needed)
    origin = (targets.end if after else targets.start - width)[target]
    moves = tokens > 0
    by_sender = _needed(senders, mine, width, after, shifted)[2].sum(1, dtype=jnp.int32)
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


def _needed(
    senders: Cuts, targets: Cuts, width: int, after: bool, shifted: bool
) -> tuple[Array, Array, Array]:
    """Returns what each target needs of each sender, [senders, targets]; see `receive_halo`.

    The results are the tokens between their starts (`_FAR` if it needs nothing), the first token in
    the document, and how many tokens.
    """
    senders = Cuts._make(x[:, None] for x in senders)
    targets = Cuts._make(x[None] for x in targets)
    if after:
        low, high = targets.end, targets.end + width
        if shifted:
            low = jnp.maximum(low, targets.start + width)
        distance = senders.start - targets.start
    else:
        low, high = targets.start - width, targets.start
        if shifted:
            high = jnp.minimum(high, targets.end - width)
        distance = targets.start - senders.start
    is_linked = (senders.document == targets.document) & senders.used & (distance > 0)
    first = jnp.maximum(senders.start, low)
    tokens = jnp.maximum(jnp.minimum(senders.end, high) - first, 0)
    return jnp.where(is_linked, distance, _FAR), first, jnp.where(is_linked, tokens, 0)


def _last_rows(
    pieces: Pieces,
    x: Shaped[Array, "rows ..."],
    width: int,
    initial: Shaped[Array, "B width ..."] | None,
    fill: Any = 0,
) -> Shaped[Array, "B width ..."]:
    """Returns this rank's contribution to the last `width` tokens of the last documents.

    Tokens that a document does not have in this call are those of the state before it, if it is the
    first of the row, else `fill`; rank 0 contributes them. In a row without tokens, the state stays
    as it is.
    """
    ends, num_rows = pieces.row_ends, pieces.begin.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    token = ends.last_end[:, None] - width + place
    row = token - jnp.asarray(pieces.rank, jnp.int32) * num_rows
    is_own = (token >= ends.last_begin[:, None]) & (row >= 0) & (row < num_rows)
    group = jnp.arange(len(row), dtype=jnp.int32)[:, None] * num_rows
    flat = jnp.where(is_own, group + row, 0)
    own = where_or_zero(is_own, x.at[flat].get(mode="promise_in_bounds"))
    is_older = (token < ends.last_begin[:, None]) & (pieces.rank == 0)
    older = jnp.full_like(own, fill)
    if initial is not None:
        length = (ends.last_end - ends.last_begin)[:, None]
        before = jnp.minimum(place + length, width - 1)
        kept = jnp.take_along_axis(
            initial.astype(x.dtype), before.reshape(*before.shape, *[1] * (x.ndim - 1)), axis=1
        )
        # The last document is also the first, or there is none.
        is_first = (ends.last_begin == ends.first_begin) | (ends.last_end == 0)
        older = chosen(is_first, kept, older)
    return chosen(is_older, older, own)


# ---- `shift`, and the same in a data loader.

_OP = "shift"


@door(_OP, **STEPS_OF_DOCUMENTS)
def shift(
    x: PyTree[Shaped[HostOrDevice, "B T ..."]],
    offset: int,
    *,
    fill: float | int = 0,
    initial_state: PyTree[Shaped[HostOrDevice, "B V ..."]] | None = None,
    return_state: bool = False,
    **call: Unpack[LayerOptions],
) -> PyTree[Shaped[Array, "B T ..."]] | Any:
    """Gives each token the row of the token `offset` before it in its document.

        y[t] = x[t - offset]

    Call inside `jax.shard_map` over `axis_name`, on every rank, or on global arrays. Linear in `x`;
    its derivative shifts back. For each cut of a document, abs(offset) rows move, in one exchange
    for all arrays, or, if `head_axis` shards only some of them, one for these and one for the
    others. To shift labels or tokens, `shift_documents` in the data loader moves nothing in the
    step.

    Args:
      x: arrays of any dtype.
      offset: tokens; negative: the row of a later token.
      fill: the value where the document has no such token, and in padding.
      axis_name, documents, segment_ids, positions, mesh, batch_axis, implementation, deadline: see
        `causal_conv`.
      head_axis: for global arrays: the mesh axis that shards axis 2.
      initial_state: for documents that continue: the V = `offset` rows before the first document of
        each batch row, in the structure of `x`, the same on all ranks; `fill` in a row that begins
        a document. Only in packed order, and for positive offsets.
      return_state: also return the last `offset` rows of the last document of each batch row, for
        the next call; `fill` where it has none. Padding does not count; a row without tokens keeps
        its state.
    Returns:
      Arrays in the structure of `x`; or (arrays, state), the state in that structure, on all ranks.
    Raises:
      As `causal_conv`.
    """
    check_integer(_OP, "offset", offset)
    for each in jax.tree.leaves(x):
        check_value_of(_OP, "fill", fill, each.dtype)
    carried = Carried(initial_state, return_state, head_axis=2)
    if carried.is_used and offset < 1:
        raise ValueError(
            f"{_OP}: offset is {offset}; initial_state and return_state need a positive one: a "
            "state has earlier tokens. Omit both, or shift whole documents in the data loader, by "
            "shift_documents."
        )
    of_rows = lambda x: jax.ShapeDtypeStruct((x.shape[0], offset, *x.shape[2:]), x.dtype)
    next_step = "Pass the last rows of each running document, as return_state=True returns them."
    check_state(_OP, initial_state, jax.tree.map(of_rows, x), next_step)
    run = _Shift(int(offset), fill)
    layer = Layer(exchange_of(_OP, call), run, like_tokens=True, moves=offset != 0)
    return call_layer(layer, x, (), carried, call)


class _Shift(NamedTuple):
    offset: int
    fill: Any

    @jax.named_scope("cpd.shift")
    def __call__(
        self,
        exchange: CollectiveOptions,
        pieces: Pieces,
        x: Any,
        weights: tuple[()],
        carried: Carried,
    ) -> tuple[Any, Any]:
        offset, fill = self
        size, groups = pieces.begin.size, pieces.begin.shape
        leaves, tree = jax.tree.flatten(pieces.arrange(x))
        own = rows = [x.reshape(size, *x.shape[2:]) for x in leaves]
        source = _sources(pieces, offset)
        if offset and pieces.world_size > 1:
            rows = list(own)
            # One exchange for all arrays that vary over the same mesh axes: beside others, an array
            # would begin to vary over their axes.
            for axes in dict.fromkeys(map(varying_axes, own)):
                moved = {i: x for i, x in enumerate(own) if varying_axes(x) == axes}
                to = {"after": offset < 0, "shifted": True}
                halo = receive_halo(exchange, pieces, moved, abs(offset), **to)
                for i, x in moved.items():
                    rows[i] = jnp.concatenate([x, jax.lax.collapse(halo[i], 0, 2)])

        def shifted(x: Array) -> Array:
            valid = (source >= 0).reshape(-1, *[1] * (x.ndim - 1))
            moved = x[jnp.maximum(source, 0)]
            moved = jnp.where(valid, moved, jnp.asarray(fill, x.dtype))
            return moved.reshape(*groups, *x.shape[1:])

        out = list(map(shifted, rows))
        initial = [None] * len(own)
        if carried.initial is not None:
            initial = jax.tree.leaves(carried.initial)
            out = [_after(pieces, *both) for both in zip(out, initial, strict=True)]
        state = None
        if carried.is_returned:
            both = zip(own, initial, strict=True)
            state = tree.unflatten(_last_rows(pieces, x, offset, s, fill) for x, s in both)
        return pieces.restore(tree.unflatten(out)), state


def _after(
    pieces: Pieces, x: Shaped[Array, "B L ..."], state: Shaped[Array, "B V ..."]
) -> Shaped[Array, "B L ..."]:
    """Gives the first tokens of the first document of each batch row the rows before it."""
    width, first = state.shape[1], pieces.row_ends.first_piece(pieces)
    row = pieces.begin.shape[1] * first.slot  # of the group
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None] - (first.row - row)[:, None]
    place = jnp.where((place >= 0) & (place < first.length[:, None]), place, width)
    place += first.start[:, None]
    is_first = place < width
    place = jnp.where(is_first, place, 0).reshape(*place.shape, *[1] * (x.ndim - 2))
    return chosen(is_first, jnp.take_along_axis(state, place, axis=1).astype(x.dtype), x)


def _sources(pieces: Pieces, offset: int) -> Array:
    """Returns for each row the row that it takes, of (this rank's, the halo's); -1: none."""
    size, width = pieces.begin.size, abs(offset)
    row = jnp.arange(size, dtype=jnp.int32)
    first_row = jnp.arange(0, size, pieces.begin.shape[1], dtype=jnp.int32)[:, None]
    end = where_or_zero(pieces.is_token, run_ends(pieces.begin) + first_row).reshape(-1)
    begin = pieces.begin.reshape(-1)
    source = row - offset
    inside = (begin >= 0) & (source >= begin) & (source < end)
    own = pieces.own_earlier if offset < 0 else pieces.own_later
    slot = pieces.slots(own).reshape(-1) - 1
    if offset > 0:  # the halo holds tokens [start - width, start)
        place = row - begin
        exists = (own.start[slot] + place - width >= 0) & (place < width)
    else:  # [end, end + width)
        place = row - end + width
        same = own.document[:, None] == pieces.later.document[None]
        length = jnp.where(same, pieces.later.end[None], 0).max(1, initial=0)  # of its document
        exists = own.start[slot] + row - begin + width < length[slot]
        exists &= place >= 0
    in_halo = (slot >= 0) & exists & ~inside
    return jnp.where(inside, source, jnp.where(in_halo, size + slot * width + place, -1))


_OF_DOCUMENTS = "shift_documents"


@door(_OF_DOCUMENTS, **STEPS_OF_DOCUMENTS)
def shift_documents(
    x: PyTree[Shaped[np.ndarray, "B T ..."]],
    offset: int,
    *,
    documents: Documents | None = None,
    segment_ids: Integer[np.ndarray, "B T"] | None = None,
    positions: Integer[np.ndarray, "B T"] | None = None,
    fill: float | int = 0,
) -> PyTree[Shaped[np.ndarray, "B T ..."]]:
    """Gives each token the row of the token `offset` before it in its document.

    For data loaders: NumPy, on batches in the order of their documents; place the result. The
    labels of next-token prediction are `shift_documents(tokens, -1, ...)`, those of prediction
    depth d `shift_documents(tokens, -d, ...)`.

    Args:
      x, offset, fill: see `shift`.
      documents: in packed order, on the host.
      segment_ids, positions: the short form, see `context_parallel_attention`.
    Returns:
      Arrays in the structure of `x`.
    Raises:
      TypeError, ValueError: an argument is invalid, or a document is not contiguous.
    """
    import jax  # only its trees; no device is used

    check_integer(_OF_DOCUMENTS, "offset", offset)
    if documents is None and segment_ids is None:
        raise TypeError(f"{_OF_DOCUMENTS}: got no documents. Pass documents, or segment_ids.")
    given = read_given_tokens(_OF_DOCUMENTS, documents, segment_ids, positions)
    if given.order != PACKED:
        raise ValueError(
            f"{_OF_DOCUMENTS}: the documents are in {given.order}, in which neighbours need not be "
            "neighbours in a document. Shift in packed order, then apply the other order."
        )
    document = from_segment_ids(_OF_DOCUMENTS, given.segment_ids, given.positions).numbers()
    num_tokens = document.shape[1]
    source = np.arange(num_tokens) - offset
    inside = (source >= 0) & (source < num_tokens)
    source = np.clip(source, 0, max(num_tokens - 1, 0))
    valid = inside & (document == document[:, source]) & (document > 0)

    def shifted(x: Any) -> Any:
        if x.shape[:2] != document.shape:
            raise ValueError(
                f"{_OF_DOCUMENTS}: an array has shape {x.shape} but segment_ids "
                f"{document.shape}; it needs to start with [B, T]."
            )
        check_value_of(_OF_DOCUMENTS, "fill", fill, x.dtype)
        keep = valid.reshape(*valid.shape, *[1] * (x.ndim - 2))
        return np.where(keep, x[:, source], np.asarray(fill, x.dtype))

    return jax.tree.map(shifted, x)


# ---- `causal_conv`: the short depthwise convolution of hybrid models, within documents.

_CONV = "causal_conv"


@door(
    _CONV,
    **STEPS_OF_DOCUMENTS,
    weight="Pass one weight for each tap and channel.",
    bias="Pass one value for each channel.",
    initial_state="Pass the last tokens of each running document.",
)
def causal_conv(
    x: Float[HostOrDevice, "B T C"],
    weight: Float[HostOrDevice, "W C"],
    bias: Float[HostOrDevice, " C"] | None = None,
    *,
    initial_state: Float[HostOrDevice, "B W-1 C"] | None = None,
    return_state: bool = False,
    **call: Unpack[LayerOptions],
) -> Float[Array, "B T C"] | Any:
    """Computes a depthwise convolution over the tokens of each document, of this and earlier ones.

        y[t] = bias + sum_i weight[i] * x[t - (W - 1) + i]

    Tokens before the document are zero. Call inside `jax.shard_map` over `axis_name`, on every
    rank, or on global arrays. Differentiable. For each cut of a document, W - 1 rows move, in one
    exchange; its derivative is another. The sum accumulates in float32 and is rounded once. Padding
    is not read and its output is zero.

    Args:
      x: tokens, C channels.
      weight: of W taps; the last is that of the token itself. The same on all ranks.
      bias: added to each token.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      documents: what the tokens are, and their order, in which the arrays are; or, inside
        `jax.shard_map`, the `document_pieces` of them. A plan of another batch is an error.
      segment_ids, positions: the short form for packed order, see `context_parallel_attention`;
        without it, each batch row is one document.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`; `head_axis`
        shards C.
      implementation, deadline: of the exchange, see `dispatch`.
      initial_state: for documents that continue: the W - 1 tokens before the first document of
        each batch row, the same on all ranks; zeros in a row that begins a document. Only in packed
        order.
      return_state: also return the last W - 1 tokens of the last document of each batch row, for
        the next call. Padding does not count; a row without tokens keeps its state.
    Returns:
      The convolution, in the shape and dtype of x; or (convolution, state), the state in x's dtype,
      on all ranks.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    if not len(weight):
        raise ValueError(
            f"{_CONV}: weight has no taps; it needs at least one, of the token itself."
        )
    weights = (weight,) if bias is None else (weight, bias)
    layer = Layer(exchange_of(_CONV, call), _convolve, moves=len(weight) > 1)
    carried = Carried(initial_state, return_state, head_axis=2)
    return call_layer(layer, x, weights, carried, call)


@jax.named_scope("cpd.causal_conv")
def _convolve(
    exchange: CollectiveOptions,
    pieces: Pieces,
    x: Array,
    weights: tuple[Array, ...],
    carried: Carried,
) -> tuple[Array, Array | None]:
    """Computes the convolution of one rank's rows [B, T, C]."""
    weight, *bias = weights
    width, dtype = weight.shape[0] - 1, x.dtype
    wide = sum_dtype(dtype)
    rows = pieces.arrange(x)
    row = jnp.arange(pieces.begin.size, dtype=jnp.int32).reshape(pieces.begin.shape)
    offset = jnp.where(pieces.is_token, row - pieces.begin, -1)  # in its piece
    total = jnp.zeros(rows.shape, wide)
    for back in range(width + 1):  # the token `back` before
        here = jnp.pad(rows, ((0, 0), (back, 0), (0, 0)))[:, : rows.shape[1]]
        here = jnp.where((offset >= back)[..., None], here.astype(wide), 0)
        total += here * weight[width - back][None, None].astype(wide)
    flat = jax.lax.collapse(rows, 0, 2)
    if width and pieces.world_size > 1:
        before = receive_halo(exchange, pieces, flat, width)
        total = _add_before(total, pieces.own_later, before, weight.astype(wide))
    initial = carried.initial
    if width and initial is not None:
        piece = pieces.row_ends.first_piece(pieces)
        place = jnp.arange(width, dtype=jnp.int32)[None] + piece.start[:, None]
        inside = place < width  # tokens of the state, not of this call
        place = jnp.where(inside, place, 0)[..., None]
        before = where_or_zero(inside, jnp.take_along_axis(initial, place, axis=1))
        total = _add_before(total, piece, before, weight.astype(wide))
    for x in bias:
        total += x[None, None].astype(wide)
    out = jnp.where(pieces.is_token[..., None], total, 0).astype(dtype)
    state = _last_rows(pieces, flat, width, initial) if carried.is_returned else None
    return pieces.restore(out), state


def _add_before(
    total: Float[Array, "G L C"],
    own: Cuts,
    before: Float[Array, "P V C"],
    weight: Float[Array, "W C"],
) -> Float[Array, "G L C"]:
    """Adds what the tokens before pieces contribute to their first rows."""
    width, shape = weight.shape[0] - 1, total.shape
    size = shape[0] * shape[1]
    padded = jnp.pad(before.astype(total.dtype), ((0, 0), (0, width), (0, 0)))
    # Row i of a piece takes tokens i, ..., i + W - 1 of (before, piece); those of the piece are in
    # `total` already.
    added = sum(padded[:, i : i + width] * weight[i][None, None] for i in range(width))
    index = jnp.arange(width, dtype=jnp.int32)[None]
    reaches = own.used[:, None] & (index < own.length[:, None])
    at = jnp.where(reaches, own.row[:, None] + index, size)
    total = jax.lax.collapse(total, 0, 2).at[at].add(added, mode="drop")
    return total.reshape(shape)
