"""`dispatch` and `combine`: move tokens between the ranks of a mesh axis as metadata says."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Num, PyTree, Shaped

from jax_cp_dispatch._varying import vary_alike
from jax_cp_dispatch.dispatch_primitives import (
    COMBINE_DTYPES,
    MetadataOperands,
    combine_p,
    dispatch_p,
    widen,
)
from jax_cp_dispatch.metadata import Metadata

DEFAULT_DEADLINE = 60.0
"""Seconds that the ranks of one call wait for the last of them."""

_LONGEST_DEADLINE = 1e8  # three years; the handlers' clock counts nanoseconds in 64 bits

AxisName = str | tuple[str, ...]


def dispatch(
    x: PyTree[Shaped[Array, "T ..."]],
    metadata: Metadata,
    *,
    axis_name: AxisName,
    capacity: int,
    out: PyTree[Shaped[Array, "capacity ..."]] | None = None,
    deadline: float = DEFAULT_DEADLINE,
) -> PyTree[Shaped[Array, "capacity ..."]]:
    """Sends each shard of `x` to the ranks that `metadata` names, bit for bit.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis. The arrays of `x`
    travel in one exchange, each in its own dtype and feature shape.

    Linear in `x`; its transpose is `combine`. Metadata has no tangent.

    Args:
      x: this rank's tokens in MLP layout; every array has the same number of rows T.
      metadata: forward (or reverse) metadata, this rank's slice or the global one; offsets and
        lengths count tokens.
      axis_name: the mesh axis whose devices are the ranks, or several, the major one first.
      capacity: rows of the receive buffer; at least the largest `num_total_recv_tokens`.
      out: storage to reuse, with the shapes and dtypes of the result; what it holds does not
        matter. Donate it to the program, and the result is written in place.
      deadline: seconds until the ranks that have arrived give up on those that have not.
    Returns:
      Received tokens in attention layout, in the structure of `x`; rows nobody writes are zero.
    Raises:
      TypeError: an array has a dtype of less than a byte.
      ValueError: shapes, `axis_name`, the size of the axis or `out` do not fit.
      jax.errors.JaxRuntimeError: when the program runs, on every rank of the group, and nothing
        has moved: the plan does not fit `capacity` or the rows of `x`, its ranges overlap, or a
        rank missed the deadline. All later calls of that execution then fail too, in every group;
        a group that goes straight to a collective with the failed one waits there until XLA ends
        the process.
    """
    op = "dispatch"
    arrays, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    if capacity < 0:
        raise ValueError(f"{op}: capacity is {capacity}; it needs to be at least 0 rows.")
    _check_arrays(op, "x", arrays)
    storage = [] if out is None else _check_storage(op, out, arrays, tree, capacity)
    deadline_ms = _milliseconds(op, deadline)
    moving = _moving(arrays, capacity)
    operands, moved, axis = _prepare(
        op, metadata, axis_name, [x[i] for x in (arrays, storage) if x for i in moving]
    )
    received = []
    if moving:
        received = dispatch_p.bind(
            *operands,
            *moved,
            num_arrays=len(moving),
            capacity=capacity,
            axis=axis,
            deadline_ms=deadline_ms,
        )
    dtypes = [x.dtype for x in arrays]
    return jax.tree.unflatten(tree, _with_empty(received, arrays, capacity, dtypes, operands))


def combine(
    y: PyTree[Num[Array, "capacity ..."]],
    metadata: Metadata,
    *,
    axis_name: AxisName,
    num_tokens: int,
    preferred_element_type: DTypeLike | None = None,
    deadline: float = DEFAULT_DEADLINE,
) -> PyTree[Num[Array, "T ..."]]:
    """Brings tokens home from attention layout and sums the replicas of each.

    The adjoint of `dispatch` with the same, forward, metadata. Sums in a fixed order (slots, then
    replicas 0 ... C-1), so that results are bitwise repeatable; accumulates float64 in float64,
    narrower floats in float32, integers in their own width, and rounds once.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis.

    Linear in `y`; its transpose is `dispatch`. Metadata has no tangent.

    Args:
      y: this rank's rows in attention layout; every array has the same number of rows.
      metadata: the forward metadata, this rank's slice or the global one.
      axis_name: the mesh axis whose devices are the ranks, or several, the major one first.
      num_tokens: rows T of the result.
      preferred_element_type: dtype of the result; None means the dtype of `y`.
      deadline: seconds until the ranks that have arrived give up on those that have not.
    Returns:
      This rank's tokens in MLP layout, in the structure of `y`; rows that no shard names are zero.
    Raises:
      TypeError: an array has a dtype that cannot be summed.
      ValueError: shapes, `axis_name` or the size of the axis do not fit.
      jax.errors.JaxRuntimeError: as `dispatch`.
    """
    op = "combine"
    arrays, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, y))
    if num_tokens < 0:
        raise ValueError(f"{op}: num_tokens is {num_tokens}; it needs to be at least 0 rows.")
    _check_arrays(op, "y", arrays)
    results = [jnp.dtype(preferred_element_type or array.dtype) for array in arrays]
    arrays = [widen(array) for array in arrays]
    for array in arrays:
        if array.dtype.name not in COMBINE_DTYPES:
            raise TypeError(
                f"{op}: cannot sum {array.dtype.name}; it sums {', '.join(COMBINE_DTYPES)} and "
                "float8. Cast the rows to one of these first."
            )
    # The handler rounds to y's dtype or not at all; any other dtype is made from the unrounded sum.
    dtypes = [
        array.dtype if result == array.dtype else _accumulation_dtype(array.dtype)
        for array, result in zip(arrays, results, strict=True)
    ]
    deadline_ms = _milliseconds(op, deadline)
    moving = _moving(arrays, num_tokens)
    operands, moved, axis = _prepare(op, metadata, axis_name, [arrays[i] for i in moving])
    sums = []
    if moving:
        sums = combine_p.bind(
            *operands,
            *moved,
            num_tokens=num_tokens,
            dtypes=tuple(dtypes[i].name for i in moving),
            axis=axis,
            deadline_ms=deadline_ms,
        )
    sums = _with_empty(sums, arrays, num_tokens, dtypes, operands)
    rounded = [total.astype(result) for total, result in zip(sums, results, strict=True)]
    return jax.tree.unflatten(tree, rounded)


def _moving(arrays: Sequence[Array], num_rows: int) -> list[int]:
    """The arrays that have elements on both sides: jaxlib 0.11 crashes on a call with others."""
    return [i for i, array in enumerate(arrays) if array.size > 0 and num_rows > 0]


def _with_empty(
    results: Sequence[Array],
    arrays: Sequence[Array],
    num_rows: int,
    dtypes: Sequence[Any],
    operands: MetadataOperands,
) -> list[Array]:
    """The results of the arrays that moved, and zeros for those of which nothing could."""
    moved = dict(zip(_moving(arrays, num_rows), results, strict=True))
    return [
        moved[i]
        if i in moved
        else vary_alike([jnp.zeros((num_rows, *array.shape[1:]), dtype), array, operands.seq_len])[
            0
        ]
        for i, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True))
    ]


def _accumulation_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _milliseconds(op: str, deadline: float) -> int:
    if not 0 < deadline < math.inf:
        raise ValueError(
            f"{op}: deadline is {deadline}; it needs to be a positive number of seconds."
        )
    return max(1, round(1000 * min(deadline, _LONGEST_DEADLINE)))


def _check_arrays(op: str, name: str, arrays: Sequence[Array]) -> None:
    """Every array has rows, the same number of them, of whole bytes."""
    if not arrays:
        raise ValueError(f"{op}: {name} holds no array. Pass at least one array [rows, ...].")
    for array in arrays:
        if array.ndim == 0:
            raise ValueError(f"{op}: {name} holds a scalar; every array needs rows: [rows, ...].")
        if array.shape[0] != arrays[0].shape[0]:
            raise ValueError(
                f"{op}: the arrays of {name} have {[a.shape[0] for a in arrays]} rows; arrays that "
                "travel together need the same number. Make one call for each number of rows."
            )
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise TypeError(f"{op}: {name} has dtype {array.dtype}; move its data, not the keys.")
        if not jnp.issubdtype(array.dtype, jnp.bool_) and _num_bits(array.dtype) % 8:
            raise TypeError(
                f"{op}: {name} has dtype {array.dtype.name}, less than a byte per element, which "
                "cannot be addressed. Cast to int8, or pack two elements into one byte."
            )


def _num_bits(dtype: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits


def _check_storage(op: str, out: Any, arrays: Sequence[Array], tree: Any, capacity: int) -> list:
    storage, out_tree = jax.tree.flatten(out)
    wanted = [((capacity, *x.shape[1:]), x.dtype) for x in arrays]
    got = [(x.shape, x.dtype) for x in storage]
    if out_tree != tree or got != wanted:
        shapes = lambda pairs: ", ".join(f"{d.name}{list(s)}" for s, d in pairs)
        raise ValueError(
            f"{op}: out holds {shapes(got)} but the result is {shapes(wanted)}. Pass an earlier "
            "result of the same call, or leave out away."
        )
    return storage


def _prepare(
    op: str, metadata: Metadata, axis_name: AxisName, arrays: Sequence[Array]
) -> tuple[MetadataOperands, list[Array], str]:
    """Checks what Python can see; returns operands that all vary over the same mesh axes."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    axis = ",".join(names)
    num_ranks = _num_ranks(op, names)
    if metadata.world_size != num_ranks:
        raise ValueError(
            f"{op}: metadata is for world_size={metadata.world_size} but axis {axis!r} has "
            f"{num_ranks} devices. Plan with world_size={num_ranks}."
        )
    rank = jax.lax.axis_index(names)
    local = metadata.local_view(rank)
    _check_local(op, local, num_ranks)
    seq_len = local.seq_len.astype(jnp.uint32)
    src_offset = local.src_offset
    if src_offset is None:  # shards stand one after another
        src_offset = jnp.cumsum(seq_len) - seq_len
    columns = lambda a: a[:, None] if a.ndim == 1 else a
    fields = [
        columns(local.dst_rank).astype(jnp.int32),
        columns(local.dst_offset).astype(jnp.uint32),
        seq_len,
        src_offset.astype(jnp.uint32),
        local.num_recv_tokens.astype(jnp.uint32),
    ]
    if seq_len.size == 0:  # one slot of padding, for the same reason as in `_moving`
        fields[:4] = [
            jnp.full((1, 1), -1, jnp.int32),
            jnp.zeros((1, 1), jnp.uint32),
            *jnp.zeros((2, 1), jnp.uint32),
        ]
    varying = vary_alike([*fields, *arrays], also=names)
    rank_and_group = jnp.stack([rank, _group(op, names)]).astype(jnp.int32)
    operands = MetadataOperands(rank_and_group, *varying[: len(fields)])
    return operands, varying[len(fields) :], axis


def _num_ranks(op: str, names: tuple[str, ...]) -> int:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    missing = [name for name in names if name not in manual]
    if missing:
        raise ValueError(
            f"{op}: axis_name {missing[0]!r} is not a manual mesh axis here; manual are "
            f"{tuple(manual)}. Call {op} inside jax.shard_map over {missing[0]!r}."
        )
    return math.prod(jax.lax.axis_size(name) for name in names)


def _group(op: str, names: tuple[str, ...]) -> Array:
    """Which of the independent groups of ranks this device is in: its place on the other axes."""
    mesh = jax.sharding.get_abstract_mesh()
    group = jnp.int32(0)
    for name in mesh.axis_names:
        if name in names or mesh.shape[name] == 1:
            continue
        if name not in mesh.manual_axes:
            raise ValueError(
                f"{op}: mesh axis {name!r} is not manual here, so that its groups of ranks cannot "
                f"be told apart. Make it manual around the call: jax.shard_map(..., axis_names="
                f"{{{name!r}}})."
            )
        group = group * mesh.shape[name] + jax.lax.axis_index(name)
    return group


def _check_local(op: str, local: Metadata, num_ranks: int) -> None:
    """One rank's fields fit each other; their values are checked where they are known."""
    slots = local.seq_len.shape
    wanted = {
        "seq_len": (slots,),
        "dst_rank": (slots, (*slots, local.dst_rank.shape[-1])),
        "dst_offset": (local.dst_rank.shape,),
        "src_offset": (slots,),
        "num_recv_tokens": ((num_ranks + 1,),),
    }
    for name, shapes in wanted.items():
        field = getattr(local, name)
        if field is None:
            continue
        if not jnp.issubdtype(field.dtype, jnp.integer):
            raise TypeError(
                f"{op}: metadata.{name} has dtype {field.dtype.name}; ranks, rows and lengths are "
                "integers. See Metadata.normalize_dtype()."
            )
        if field.shape not in shapes:
            raise ValueError(
                f"{op}: metadata.{name} of one rank has shape {list(field.shape)} but seq_len has "
                f"{list(slots)} and the axis {num_ranks} ranks, so it needs "
                f"{' or '.join(str(list(shape)) for shape in shapes)}. See Metadata.validate()."
            )
