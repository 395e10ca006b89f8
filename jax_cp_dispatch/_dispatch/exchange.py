"""Turns the arguments of a public call into one call of a primitive."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_cp_dispatch._dispatch import checks
from jax_cp_dispatch._dispatch.buffers import DispatchBuffer, buffer_limits
from jax_cp_dispatch._dispatch.devices import place_arrays, vary_with
from jax_cp_dispatch._dispatch.operands import Call, Collectives, Part, summable
from jax_cp_dispatch._dispatch.primitives import combine_p, dispatch_p
from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._ranks.deadline import DEFAULT_DEADLINE
from jax_cp_dispatch._ranks.entry import find_ranks
from jax_cp_dispatch._ranks.place import Place
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.metadata import Metadata

Rows = Array | np.ndarray


class Piece(NamedTuple):
    """Arrays of one call that move by the same metadata.

    Attributes:
      name: name of the argument, for messages.
      tree: the structure of arrays and results.
      num_rows: rows per rank of the results.
      dtypes: of the results; None if arrays keep theirs, as in `dispatch`.
      sums: dtypes of the primitive's results, before the last rounding; None as above.
      storage: arrays that the results may reuse, if any.
      buffer: id of a registered buffer; 0 is none.
      limits: what the buffer allows; None without one.
      capacity_name: the argument that sets the capacity, for messages.
      stamp: this rank's stamp, i32 [7], or None; see csrc/dispatch/dispatch.h.
    """

    name: str
    arrays: list[Array]
    tree: Any
    metadata: Metadata
    num_rows: int
    dtypes: list[Any] | None = None
    sums: list[Any] | None = None
    storage: Any = None
    buffer: int = 0
    limits: DispatchBuffer | None = None
    capacity_name: str = "capacity"
    stamp: Array | None = None


def outgoing(op, name, prefix, x, metadata, capacity, buffer, out) -> Piece:
    """Makes a piece of `dispatch`."""
    arrays, tree = _flatten(x)
    checks.check_arrays(op, name, arrays)
    checks.check_is_metadata(op, f"{prefix}metadata", metadata)
    if (capacity is None) == (buffer is None):
        raise ValueError(
            f"{op}: got {'neither' if buffer is None else 'both'} of {prefix}capacity and "
            f"{prefix}buffer; it needs exactly one of them."
        )
    if buffer is None:
        num_rows = checks.check_num_rows(op, f"{prefix}capacity", capacity)
        piece = Piece(name, arrays, tree, metadata, num_rows, storage=out)
    else:
        limits = buffer_limits(op, buffer)
        piece = Piece(name, arrays, tree, metadata, limits.capacity, storage=out)
        piece = piece._replace(buffer=buffer, limits=limits)
    return piece._replace(capacity_name=f"{prefix}capacity")


def returning(op, name, prefix, y, metadata, num_tokens, buffer, dtype) -> Piece:
    """Makes a piece of `combine`."""
    arrays, tree = _flatten(y)
    checks.check_arrays(op, name, arrays)
    checks.check_is_metadata(op, f"{prefix}metadata", metadata)
    num_rows = checks.check_num_rows(op, f"{prefix}num_tokens", num_tokens)
    summations = [_summation(op, y.dtype, dtype) for y in arrays]
    arrays = [
        y if y.dtype == s.operand else jax.lax.convert_element_type(y, s.operand)
        for y, s in zip(arrays, summations, strict=True)
    ]
    dtypes, sums = [s.result for s in summations], [s.total for s in summations]
    piece = Piece(name, arrays, tree, metadata, num_rows, dtypes, sums)
    piece = piece._replace(capacity_name=f"{prefix}capacity")
    if buffer is None:
        return piece
    return piece._replace(buffer=buffer, limits=buffer_limits(op, buffer))


def _flatten(tree: Any) -> tuple[list[Array], Any]:
    leaves, structure = jax.tree.flatten(tree)
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves], structure


class _Summation(NamedTuple):
    """The dtypes of a moved array, of its sum from the handler, and of the result."""

    operand: Any
    total: Any
    result: Any


@functools.lru_cache(maxsize=1024)  # a model makes the same call in every layer
def _summation(op: str, dtype: Any, preferred: Any) -> _Summation:
    result = jnp.dtype(preferred or dtype)
    operand = summable(dtype)
    checks.check_summable(op, operand)
    # A result that is wider, or no longer an integer, is summed in its dtype: y is cast first.
    summed, needed = _accumulation_dtype(operand), _accumulation_dtype(result)
    is_integer, is_real = (
        [jnp.issubdtype(dtype, kind) for dtype in (summed, needed)]
        for kind in (jnp.integer, jnp.floating)
    )
    is_alike = is_integer[0] == is_integer[1] and is_real[0] == is_real[1]
    if (is_alike and needed.itemsize > summed.itemsize) or (is_integer[0] and is_real[1]):
        operand = needed
    # The handler rounds to y's dtype or not at all; other dtypes are made from the unrounded sum.
    total = operand if operand == result else _accumulation_dtype(operand)
    return _Summation(operand, total, result)


def _accumulation_dtype(dtype: Any) -> Any:
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else dtype


def move(
    op: str,
    pieces: Sequence[Piece],
    axis_name: AxisName,
    mesh: Any,
    implementation: str | None,
    deadline: float | None,
    by_collectives: Collectives | None = None,
) -> list[Any]:
    """Makes one exchange of all pieces; returns their results in the structures of the arrays."""
    if deadline is None:
        deadline = max((p.limits.deadline for p in pieces if p.limits), default=DEFAULT_DEADLINE)
    comm, place = find_ranks(
        op,
        axis_name,
        [x for p in pieces for x in (*p.arrays, p.metadata.seq_len)],
        mesh=mesh,
        implementation=implementation,
        deadline=deadline,
    )
    num_ranks = comm.num_ranks or pieces[0].metadata.world_size
    comm = dataclasses.replace(comm, num_ranks=num_ranks)

    parts, fields, stamps, arrays, storage, dtypes = [], [], [], [], [], []
    for piece in pieces:
        metadata = checks.read_metadata(
            op, piece.metadata, comm.axis_names, num_ranks, all_ranks=place.is_global
        )
        moving = _moving(piece)
        if not moving:
            continue
        num_rows = piece.arrays[0].shape[0]
        if place.is_global:
            num_rows = checks.rows_per_rank(op, piece.name, num_rows, num_ranks)
        is_dispatch = piece.sums is None
        num_tokens, capacity = (
            (num_rows, piece.num_rows) if is_dispatch else (piece.num_rows, num_rows)
        )
        has_src_offset = metadata.src_offset is not None
        part = Part(len(moving), num_tokens, capacity, has_src_offset, piece.buffer)
        part = part._replace(capacity_name=piece.capacity_name)
        if piece.stamp is not None:
            part = part._replace(has_stamp=True)
            stamps.append(piece.stamp)
        parts.append(part)
        fields += metadata.present()
        if piece.limits is not None and capacity > piece.limits.capacity:
            raise ValueError(
                f"{op}: {piece.name} has {capacity} rows per rank but the capacity of buffer "
                f"{piece.buffer} is {piece.limits.capacity}. Pass another, or "
                f"grow_dispatch_buffer({piece.buffer}, capacity={capacity})."
            )
        factor = num_ranks if place.is_global else 1
        for i in moving:
            what = f"{piece.name} goes to {piece.num_rows} rows per rank"
            checks.check_size(op, what, factor * piece.num_rows, piece.arrays[i])
        arrays += [_with_rows(piece.arrays[i], factor) for i in moving]
        if piece.storage is not None:
            shapes = [((factor * capacity, *x.shape[1:]), x.dtype) for x in piece.arrays]
            stored = checks.check_storage(op, piece.storage, piece.tree, shapes)
            storage += [stored[i] for i in moving]
        if piece.sums is not None:
            dtypes += [jnp.dtype(piece.sums[i]).name for i in moving]

    call = Call(op, comm, is_global=place.is_global, by_collectives=by_collectives)
    if pieces[0].sums is None:
        bind = functools.partial(dispatch_p.bind, parts=tuple(parts))
    else:
        bind = functools.partial(combine_p.bind, parts=tuple(parts), dtypes=tuple(dtypes))
    moved = _run(bind, call, place, fields + stamps, arrays, storage) if parts else []
    return _results(pieces, moved, num_ranks if place.is_global else 1)


def _moving(piece: Piece) -> list[int]:
    """Returns the arrays whose results have elements; others never reach a handler.

    jaxlib 0.11 crashes on a custom call with an empty operand or result.
    """
    if piece.num_rows == 0:
        return []
    return [i for i, x in enumerate(piece.arrays) if math.prod(x.shape[1:]) > 0]


def _with_rows(array: Array, num_rows: int) -> Array:
    """Pads an array without rows, for the same reason; the call ignores the padding."""
    if array.shape[0] > 0:
        return array
    return vary_alike([jnp.zeros((num_rows, *array.shape[1:]), array.dtype), array])[0]


@jax.named_scope("cpd.exchange")
def _run(bind, call: Call, place: Place, fields, arrays, storage) -> list[Array]:
    arrays, names = arrays + storage, call.comm.axis_names
    if place.is_global or place.open_axes:
        arrays = place_arrays(place, names, arrays, len(storage))
    if not place.is_global:
        arrays = vary_with(fields, names, arrays)
    return bind(*fields, *arrays, call=call)


def _results(pieces: Sequence[Piece], moved: Sequence[Array], factor: int) -> list[Any]:
    """Returns rounded results in the pieces' structures, with zeros for those that did not move."""
    rest, results = iter(moved), []
    for piece in pieces:
        moving = set(_moving(piece))
        leaves = []
        for i, x in enumerate(piece.arrays):
            if i in moving:
                leaf = next(rest)
            else:
                shape = (factor * piece.num_rows, *x.shape[1:])
                leaf = vary_alike([jnp.zeros(shape, x.dtype), x, piece.metadata.seq_len])[0]
            if piece.dtypes is not None and leaf.dtype != piece.dtypes[i]:
                leaf = leaf.astype(piece.dtypes[i])
            leaves.append(leaf)
        results.append(jax.tree.unflatten(piece.tree, leaves))
    return results
