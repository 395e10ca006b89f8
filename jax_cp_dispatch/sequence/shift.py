"""`shift`: each token gets the row of another token of its document."""

from __future__ import annotations

from collections.abc import Sequence as Names
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Integer, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, check_integer, check_value_of
from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._ranks.varying import varying_axes
from jax_cp_dispatch.planner import Plan
from jax_cp_dispatch.sequence.halo import receive_halo
from jax_cp_dispatch.sequence.options import Options
from jax_cp_dispatch.sequence.pieces import Pieces
from jax_cp_dispatch.sequence.ranks import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.recurrence_arrays import check_rows

_OP = "shift"


def shift(
    x: PyTree[Shaped[HostOrDevice, "B T ..."]],
    offset: int,
    *,
    fill: float | int = 0,
    axis_name: AxisName,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    plan: Plan | Pieces | None = None,
    layout: str = "contiguous",
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> PyTree[Shaped[Array, "B T ..."]]:
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
      segment_ids: the document of each token, 0 = padding; None: each batch row is one document.
      positions: the position of each token in its document; None if segment ids alone separate the
        documents.
      plan: the plan of `place_tokens`, for tokens in placed order; or, inside `jax.shard_map`, the
        `document_pieces` of these tokens. If you also pass segment_ids, a plan of another batch is
        an error.
      layout: "contiguous" or "zigzag", see `zigzag_permutation`.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`; `head_axis`
        shards axis 2.
      implementation, deadline: of the exchange, see `dispatch`.
    Returns:
      Arrays in the structure of `x`.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, layout, implementation, deadline)
    check_integer(_OP, "offset", offset)
    check_rows(_OP, "x", x)
    for each in jax.tree.leaves(x):
        check_value_of(_OP, "fill", fill, each.dtype)
    layer = Layer(options, _Shift(int(offset), fill), like_tokens=True, moves=offset != 0)
    where, axes = Where(segment_ids, positions, plan), Axes(mesh, batch_axis, head_axis)
    return call_layer(layer, x, (), where, axes)


class _Shift(NamedTuple):
    """The shift of one rank's rows; hashable."""

    offset: int
    fill: Any

    @jax.named_scope("cpd.shift")
    def __call__(self, options: Options, pieces: Pieces, x: Any, weights: tuple[()]) -> Any:
        offset, fill = self
        size, groups = pieces.begin.size, pieces.begin.shape
        leaves, tree = jax.tree.flatten(pieces.arrange(x))
        rows = [x.reshape(size, *x.shape[2:]) for x in leaves]
        source = _sources(pieces, offset)
        if offset and pieces.world_size > 1:
            rows = _with_halo(options, pieces, rows, offset)

        def shifted(x: Array) -> Array:
            valid = (source >= 0).reshape(-1, *[1] * (x.ndim - 1))
            moved = x[jnp.maximum(source, 0)]
            moved = jnp.where(valid, moved, jnp.asarray(fill, x.dtype))
            return moved.reshape(*groups, *x.shape[1:])

        return pieces.restore(tree.unflatten(map(shifted, rows)))


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
    same = pieces.own_earlier.document[:, None] == pieces.later.document
    return jnp.where(same, pieces.later.end, 0).max(1, initial=0)
