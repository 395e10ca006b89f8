"""`shift`: each token gets the row of another of its document; `shift_documents`, in a loader."""

from __future__ import annotations

from collections.abc import Sequence as Names
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Integer, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, check_integer, check_value_of
from jax_cp_dispatch._arrays import chosen
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.varying import varying_axes
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.given import read_given_tokens
from jax_cp_dispatch.documents.table import from_segment_ids
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.sequence.call_layer import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.carried import Carried, check_state, last_rows
from jax_cp_dispatch.sequence.halo import receive_halo
from jax_cp_dispatch.sequence.pieces import Options, Pieces
from jax_cp_dispatch.sequence.recurrence import check_rows

_OP = "shift"


def shift(
    x: PyTree[Shaped[HostOrDevice, "B T ..."]],
    offset: int,
    *,
    fill: float | int = 0,
    axis_name: AxisName,
    documents: Documents | Pieces | None = None,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    initial_state: PyTree[Shaped[HostOrDevice, "B V ..."]] | None = None,
    return_state: bool = False,
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
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      documents: what the tokens are, and their order, in which the arrays are; or, inside
        `jax.shard_map`, the `document_pieces` of them. A plan of another batch is an error.
      segment_ids, positions: the short form for packed order, see `context_parallel_attention`;
        without it, each batch row is one document.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`; `head_axis`
        shards axis 2.
      implementation, deadline: of the exchange, see `dispatch`.
      initial_state: for documents that continue: the V = `offset` rows before the first document of
        each batch row, in the structure of `x`, the same on all ranks; `fill` in a row that begins
        a document. Only in packed order, and for positive offsets.
      return_state: also return the last `offset` rows of the last document of each batch row, for
        the next call; `fill` where it has none. Padding does not count; a row without tokens keeps
        its state.
    Returns:
      Arrays in the structure of `x`; or (arrays, state), the state in that structure, on all ranks.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, implementation, deadline)
    check_integer(_OP, "offset", offset)
    check_rows(_OP, "x", x)
    for each in jax.tree.leaves(x):
        check_value_of(_OP, "fill", fill, each.dtype)
    carried = Carried(initial_state, return_state, head_axis=2)
    if carried.is_used:
        _check_carried(carried, offset, x)
    layer = Layer(options, _Shift(int(offset), fill), like_tokens=True, moves=offset != 0)
    where, axes = Where(documents, segment_ids, positions), Axes(mesh, batch_axis, head_axis)
    return call_layer(layer, x, (), where, axes, carried)


def _check_carried(carried: Carried, offset: int, x: Any) -> None:
    if offset < 1:
        raise ValueError(
            f"{_OP}: offset is {offset}; initial_state and return_state need a positive one: a "
            "state has earlier tokens. Omit both, or shift whole documents in the data loader, by "
            "shift_documents."
        )
    of_rows = lambda x: jax.ShapeDtypeStruct((x.shape[0], offset, *x.shape[2:]), x.dtype)
    next_step = "Pass the last rows of each running document, as return_state=True returns them."
    check_state(_OP, carried.initial, jax.tree.map(of_rows, x), next_step)


class _Shift(NamedTuple):
    """The shift of one rank's rows; hashable."""

    offset: int
    fill: Any

    @jax.named_scope("cpd.shift")
    def __call__(
        self, options: Options, pieces: Pieces, x: Any, weights: tuple[()], carried: Carried
    ) -> tuple[Any, Any]:
        offset, fill = self
        size, groups = pieces.begin.size, pieces.begin.shape
        leaves, tree = jax.tree.flatten(pieces.arrange(x))
        own = rows = [x.reshape(size, *x.shape[2:]) for x in leaves]
        source = _sources(pieces, offset)
        if offset and pieces.world_size > 1:
            rows = _with_halo(options, pieces, rows, offset)

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
            state = tree.unflatten(last_rows(pieces, x, offset, s, fill) for x, s in both)
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


def _with_halo(options: Options, pieces: Pieces, rows: list[Array], offset: int) -> list[Array]:
    """Appends the halo: one exchange for all arrays that vary over the same mesh axes.

    Beside others, an array would begin to vary over their axes.
    """
    whole = dict(enumerate(rows))
    for axes in dict.fromkeys(map(varying_axes, rows)):
        own = {i: x for i, x in enumerate(rows) if varying_axes(x) == axes}
        halo = receive_halo(
            options.exchange, pieces, own, abs(offset), after=offset < 0, shifted=True
        )
        for i, x in own.items():
            whole[i] = jnp.concatenate([x, jax.lax.collapse(halo[i], 0, 2)])
    return list(whole.values())


def _sources(pieces: Pieces, offset: int) -> Array:
    """Returns for each row the row that it takes, of (this rank's, the halo's); -1: none."""
    size, width = pieces.begin.size, abs(offset)
    row = jnp.arange(size, dtype=jnp.int32)
    begin, end = pieces.begin.reshape(-1), pieces.ends().reshape(-1)
    source = row - offset
    inside = (begin >= 0) & (source >= begin) & (source < end)
    own = pieces.own_earlier if offset < 0 else pieces.own_later
    slot = pieces.slots(own).reshape(-1) - 1
    if offset > 0:  # the halo holds tokens [start - width, start)
        place = row - begin
        exists = (own.start[slot] + place - width >= 0) & (place < width)
    else:  # [end, end + width)
        place = row - end + width
        exists = own.start[slot] + row - begin + width < _document_lengths(pieces)[slot]
        exists &= place >= 0
    in_halo = (slot >= 0) & exists & ~inside
    return jnp.where(inside, source, jnp.where(in_halo, size + slot * width + place, -1))


def _document_lengths(pieces: Pieces) -> Array:
    """Returns the tokens of the document of each of this rank's pieces that others continue."""
    same = pieces.own_earlier.document[:, None] == pieces.later.document[None]
    return jnp.where(same, pieces.later.end[None], 0).max(1, initial=0)


_OF_DOCUMENTS = "shift_documents"


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
      x: arrays of any dtype.
      offset: tokens; negative: the row of a later token.
      documents: in packed order, on the host.
      segment_ids, positions: the short form, see `context_parallel_attention`.
      fill: the value where the document has no such token, and in padding.
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
    document = from_segment_ids(_OF_DOCUMENTS, *given.packed[1:]).numbers()
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
