"""The arguments of a public call: arrays with their metadata, and what becomes of them."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jax_cp_dispatch._arguments import check_rows, read_wide
from jax_cp_dispatch._dispatch.buffers import BufferLimits, buffer_limits
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch.metadata import Metadata

# ---- The static parts of one exchange, and the order of its operands.
#
# Operands: the metadata of every group, then the fingerprint of every group that has one, then the
# arrays of every group, then for `dispatch`, maybe, storage to reuse (one for each array).

# Dtypes of the native summation; bfloat16 and float16 accumulate in float32.
COMBINE_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


class MetadataOperands(NamedTuple):
    """The fields of forward metadata that movement reads, as integers of 32 or 64 bits.

    Either one rank's view, or the same with a leading 1 (as sharded by `in_specs=P(axis_name)`), or
    the views of all ranks with a leading W, of which a rank reads its own.
    """

    num_recv_tokens: Any  # [W + 1]
    seq_len: Any  # [S]
    dst_rank: Any  # [S] or [S, C]
    dst_offset: Any  # as dst_rank
    src_offset: Any = None  # [S]; None: shards are contiguous
    weights: Any = None  # as dst_rank, real numbers of this rank; see `combine_weighted_with_xla`

    def present(self) -> list[Any]:
        return [field for field in self if field is not None]


class OperandGroup(NamedTuple):
    """Arrays that move by the same metadata."""

    num_arrays: int
    num_tokens: int  # rows per rank in the owner's layout
    capacity: int  # rows per rank of the receive buffer
    has_src_offset: bool
    buffer: int = 0  # id of the registered buffer whose limits apply; 0: none
    capacity_name: str = "capacity"  # the argument that sets the capacity, for messages
    has_fingerprint: bool = False
    has_weights: bool = False  # such a combine is in the caller's derivative rule, not transposed

    @property
    def num_fields(self) -> int:
        """The number of arrays of the metadata that are operands."""
        return 4 + self.has_src_offset + self.has_weights


@runtime_checkable
class Collectives(Protocol):
    """A plan as XLA collectives; hashable, and equal if it moves the same."""

    def __call__(self, arrays: Sequence[Any]) -> list[Any]: ...

    def transposed(self) -> "Collectives": ...


class Exchange(NamedTuple):
    """The static parts of one call of `dispatch_p` or `combine_p`.

    Attributes:
      op: the function that was called, for messages.
      comm: the ranks.
      groups: of the operands.
      sums: names of the dtypes of the results of combine; None: dispatch.
      is_global: whether arrays hold the rows of all ranks, to be split; else this rank's.
      by_collectives: the plan as collectives, cheaper than those for any plan.
      mesh: the abstract mesh of a global call that the partitioner splits, if it is known.
      num_comm_sm: multiprocessors of a GPU that it uses; None is the default.
    """

    op: str
    comm: Communicator
    groups: tuple[OperandGroup, ...]
    sums: tuple[str, ...] | None = None
    is_global: bool = False
    by_collectives: Collectives | None = None
    mesh: Any = None
    num_comm_sm: int | None = None

    @property
    def num_before_arrays(self) -> int:
        """The number of operands before the arrays: metadata and fingerprints of all groups."""
        return sum(group.num_fields + group.has_fingerprint for group in self.groups)

    @property
    def num_arrays(self) -> int:
        return sum(group.num_arrays for group in self.groups)

    def num_storage(self, operands: Sequence[Any]) -> int:
        return len(operands) - self.num_before_arrays - self.num_arrays

    def inside(self, mesh: Any) -> "Exchange":
        """Returns the exchange of one rank, with all axes of `mesh` manual."""
        return self._replace(comm=self.comm.inside(mesh), is_global=False, mesh=None)


class ExchangeOperands(NamedTuple):
    """The operands of an exchange, or other values in the same order."""

    metadata: list[MetadataOperands]  # per group
    fingerprints: list[
        Any
    ]  # per group, None where there is none: i32 [7], see csrc/dispatch/dispatch.h
    arrays: list[Any]  # of all groups
    storage: list[Any]

    def flat(self) -> list[Any]:
        fields = [field for metadata in self.metadata for field in metadata.present()]
        return [
            *fields,
            *(x for x in self.fingerprints if x is not None),
            *self.arrays,
            *self.storage,
        ]


def read_operands(operands: Sequence[Any], exchange: Exchange) -> ExchangeOperands:
    """Separates flat operands, or other values in their order."""
    rest = list(operands)
    metadata = [_take_metadata(rest, group) for group in exchange.groups]
    fingerprints = [
        _take(rest, 1)[0] if group.has_fingerprint else None for group in exchange.groups
    ]
    arrays = _take(rest, exchange.num_arrays)
    return ExchangeOperands(metadata, fingerprints, arrays, rest)


def by_group(per_array: Sequence[Any], exchange: Exchange) -> list[list[Any]]:
    """Separates values of the arrays by group."""
    rest = list(per_array)
    return [_take(rest, group.num_arrays) for group in exchange.groups]


def _take_metadata(rest: list[Any], group: OperandGroup) -> MetadataOperands:
    fields = _take(rest, group.num_fields)
    names = [*MetadataOperands._fields[:4], *["src_offset"] * group.has_src_offset]
    names += ["weights"] * group.has_weights
    return MetadataOperands(**dict(zip(names, fields, strict=True)))


def _take(rest: list[Any], num: int) -> list[Any]:
    taken = rest[:num]
    del rest[:num]
    return taken


def groups_by_array(exchange: Exchange) -> list[OperandGroup]:
    """Returns the group of each array."""
    return [group for group in exchange.groups for _ in range(group.num_arrays)]


def select_arrays(
    operands: ExchangeOperands, exchange: Exchange, keep: Sequence[bool]
) -> tuple[ExchangeOperands, Exchange]:
    """Returns the exchange of some of the arrays, without storage and without empty groups."""
    counts = [sum(flags) for flags in by_group(keep, exchange)]
    groups = [
        group._replace(num_arrays=count)
        for group, count in zip(exchange.groups, counts, strict=True)
        if count
    ]
    sums = exchange.sums
    if sums is not None:
        sums = tuple(dtype for dtype, kept in zip(sums, keep, strict=True) if kept)
    return operands._replace(
        metadata=[m for m, count in zip(operands.metadata, counts, strict=True) if count],
        fingerprints=[x for x, count in zip(operands.fingerprints, counts, strict=True) if count],
        arrays=[x for x, kept in zip(operands.arrays, keep, strict=True) if kept],
        storage=[],
    ), exchange._replace(groups=tuple(groups), sums=sums)


def summable(dtype: Any) -> Any:
    """Returns the dtype for the native summation: float32 for one-byte floats."""
    is_known = dtype.name in COMBINE_DTYPES or not jnp.issubdtype(dtype, jnp.floating)
    return dtype if is_known else jnp.dtype(jnp.float32)


# ---- Checks of the arrays and the metadata of an exchange.

_MOST_BYTES = 2**48  # of one array; processors address no more


def check_num_rows(op: str, name: str, value: Any) -> int:
    """Requires a static number of rows."""
    try:
        num_rows = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        num_rows = None
    if num_rows is None:
        raise TypeError(
            f"{op}: {name} is {value!r}; it needs to be a static int, because it is a shape."
        )
    if num_rows < 0:
        raise ValueError(f"{op}: {name} is {num_rows}; it needs to be at least 0 rows.")
    check_rows(op, name, num_rows)
    return num_rows


def check_size(op: str, what: str, num_rows: int, array: Any) -> None:
    """Requires an addressable result; XLA aborts the process for sizes beyond 64 bits."""
    num_bytes = num_rows * math.prod(array.shape[1:]) * array.dtype.itemsize
    if num_bytes >= _MOST_BYTES:
        raise ValueError(
            f"{op}: {what}, so an array of the result would take {num_bytes} bytes, more than any "
            "machine has. Pass no more rows than the largest num_total_recv_tokens."
        )


def check_arrays(op: str, name: str, arrays: Sequence[Array]) -> None:
    """Requires arrays with the same number of rows, of whole bytes."""
    _check_shapes(op, name, *((x.shape, x.dtype) for x in arrays))


@functools.lru_cache(maxsize=1024)  # a model makes the same call in every layer
def _check_shapes(op: str, name: str, *arrays: tuple[tuple[int, ...], Any]) -> None:
    if not arrays:
        raise ValueError(f"{op}: {name} holds no array. Pass at least one array [rows, ...].")
    for shape, dtype in arrays:
        if not shape:
            raise ValueError(
                f"{op}: {name} holds a scalar; every array needs rows: [rows, ...]. Pass "
                f"numpy.asarray of a list of numbers."
            )
        if shape[0] != arrays[0][0][0]:
            raise ValueError(
                f"{op}: the arrays of {name} have {[s[0] for s, _ in arrays]} rows; arrays that "
                "travel together need the same number. Make one call for each number of rows."
            )
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise TypeError(f"{op}: {name} has dtype {dtype}; move its data, not the keys.")
        if not jnp.issubdtype(dtype, jnp.bool_) and _num_bits(dtype) % 8:
            raise TypeError(
                f"{op}: {name} has dtype {dtype.name}, less than a byte per element, which "
                "cannot be addressed. Cast to int8, or pack two elements into one byte."
            )


def _num_bits(dtype: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits


def check_summable(op: str, dtype: Any) -> None:
    """Requires a dtype that the native summation supports."""
    if dtype.name not in COMBINE_DTYPES:
        raise TypeError(
            f"{op}: cannot sum {dtype.name}; it sums {', '.join(COMBINE_DTYPES)} and float8. Cast "
            "the rows to one of these first."
        )


def check_storage(
    op: str, out: Any, tree: Any, wanted: Sequence[tuple[tuple[int, ...], Any]]
) -> list[Array]:
    """Requires an undeleted `out` with the structure, shapes and dtypes of the result."""
    storage, out_tree = jax.tree.flatten(out)
    if any(_is_deleted(x) for x in storage):
        raise ValueError(
            f"{op}: out is deleted: it was donated to an earlier call, and stays deleted even if "
            "that call failed. Pass a new array, or omit out."
        )
    got = [(jnp.shape(x), jnp.result_type(x)) for x in storage]
    if out_tree != tree or got != list(wanted):
        shapes = lambda pairs: ", ".join(f"{d.name}{list(s)}" for s, d in pairs)
        raise ValueError(
            f"{op}: out holds {shapes(got)} but the result is {shapes(wanted)}. Pass an earlier "
            "result of the same call, or omit out."
        )
    return storage


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def rows_per_rank(op: str, name: str, num_rows: int, num_ranks: int) -> int:
    """Returns the rows of each rank, from those of the arrays of all ranks."""
    if num_rows % num_ranks:
        raise ValueError(
            f"{op}: {name} has {num_rows} rows, not a multiple of the {num_ranks} ranks. "
            f"Outside shard_map, arrays hold the rows of all ranks, the same number for each: pad "
            f"them, or call {op} inside jax.shard_map."
        )
    return num_rows // num_ranks


def check_is_metadata(op: str, name: str, metadata: Any) -> None:
    """Requires a plan."""
    if not isinstance(metadata, Metadata):
        raise TypeError(
            f"{op}: {name} is {type(metadata).__name__}; it needs to be Metadata. Pass one of the "
            "two that compute_metadata returns, or q_metadata or kv_metadata of a Plan."
        )


def read_metadata(
    op: str, metadata: Metadata, names: tuple[str, ...], num_ranks: int, *, all_ranks: bool
) -> MetadataOperands:
    """Returns the fields that movement reads, after checks of their shapes and dtypes.

    `all_ranks`: one rank's view is not enough.
    """
    if metadata.world_size != num_ranks:
        raise ValueError(
            f"{op}: metadata is for world_size={metadata.world_size} but axis {','.join(names)!r} "
            f"has {num_ranks} devices. Plan with world_size={num_ranks}."
        )
    names = MetadataOperands._fields[:-1]  # weights are no part of a plan
    fields = MetadataOperands(*(getattr(metadata, name) for name in names))
    shapes = tuple(field if field is None else (field.shape, field.dtype) for field in fields)
    leading, is_empty = _check_fields(op, num_ranks, all_ranks, *shapes)
    given = {name: x for name, x in fields._asdict().items() if x is not None}
    fields = MetadataOperands(
        **{name: read_wide(op, f"metadata.{name}", given[name]) for name in given}
    )
    if not is_empty:
        return fields
    # One slot of padding, because an empty operand crashes jaxlib 0.11.
    none = jnp.zeros((*leading, 1), jnp.int32)
    return MetadataOperands(fields.num_recv_tokens, none, none - 1, none)


@functools.lru_cache(maxsize=1024)  # a model makes the same call in every layer
def _check_fields(op: str, num_ranks: int, all_ranks: bool, *given: Any) -> tuple[Any, bool]:
    fields = {
        name: field
        for name, field in zip(MetadataOperands._fields, given, strict=True)
        if field is not None
    }
    slots = fields["seq_len"][0]
    leading = slots[:-1]
    if not slots or leading not in ((num_ranks,), *(() if all_ranks else ((), (1,)))):
        needs = (
            f"[{num_ranks}, S], the plan of all ranks, where the arrays are those of all ranks"
            if all_ranks
            else f"[S] of this rank or [{num_ranks}, S] of all ranks"
        )
        raise ValueError(
            f"{op}: metadata.seq_len has shape {list(slots)}; it needs {needs}. See "
            "Metadata.get_slice()."
        )
    dst_rank = fields["dst_rank"][0]
    wanted = {
        "num_recv_tokens": (*leading, num_ranks + 1),
        "seq_len": slots,
        "dst_rank": (*slots, *dst_rank[len(slots) : len(slots) + 1]),
        "dst_offset": dst_rank,
        "src_offset": slots,
    }
    for name, (shape, dtype) in fields.items():
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                f"{op}: metadata.{name} has dtype {dtype.name}; ranks, rows and lengths are "
                "integers. See Metadata.normalize_dtype()."
            )
        if shape != wanted[name]:
            raise ValueError(
                f"{op}: metadata.{name} has shape {list(shape)} but seq_len {list(slots)} and the "
                f"axis {num_ranks} ranks, so it needs {list(wanted[name])}. See "
                "Metadata.validate()."
            )
    return leading, 0 in dst_rank


Rows = Array | np.ndarray


class Argument(NamedTuple):
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
      fingerprint: this rank's fingerprint, i32 [9], or None; see csrc/dispatch/dispatch.h.
      weights: of each replica of the rows that return, or None.
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
    limits: BufferLimits | None = None
    capacity_name: str = "capacity"
    fingerprint: Array | None = None
    weights: Array | None = None

    def in_buffer(self, op: str, buffer: int | None) -> "Argument":
        """Returns the same with the limits of a registered buffer, if there is one."""
        if buffer is None:
            return self
        return self._replace(buffer=buffer, limits=buffer_limits(op, buffer))


def outgoing(
    op: str,
    name: str,
    x: Any,
    metadata: Metadata,
    *,
    capacity: int | None = None,
    buffer: int | None = None,
) -> Argument:
    """Returns an argument of `dispatch`."""
    arrays, tree = _flatten(x)
    check_arrays(op, name, arrays)
    prefix = _prefix(name)
    check_is_metadata(op, f"{prefix}metadata", metadata)
    if (capacity is None) == (buffer is None):
        raise ValueError(
            f"{op}: got {'neither' if buffer is None else 'both'} of {prefix}capacity and "
            f"{prefix}buffer; it needs exactly one of them."
        )
    num_rows = 0
    if capacity is not None:
        num_rows = check_num_rows(op, f"{prefix}capacity", capacity)
    argument = Argument(name, arrays, tree, metadata, num_rows, capacity_name=f"{prefix}capacity")
    argument = argument.in_buffer(op, buffer)
    if argument.limits is not None:
        argument = argument._replace(num_rows=argument.limits.capacity)
    return argument


def returning(
    op: str,
    name: str,
    y: Any,
    metadata: Metadata,
    *,
    num_tokens: int,
    dtype: Any = None,
    weights: Array | None = None,
) -> Argument:
    """Returns an argument of `combine`.

    With `weights`, those rows of a token that one rank holds are summed first, times their weights,
    and rounded. It has no derivative then.
    """
    arrays, tree = _flatten(y)
    check_arrays(op, name, arrays)
    prefix = _prefix(name)
    check_is_metadata(op, f"{prefix}metadata", metadata)
    num_rows = check_num_rows(op, f"{prefix}num_tokens", num_tokens)
    summations = [_summation(op, y.dtype, dtype) for y in arrays]
    arrays = [
        y if y.dtype == s.operand else jax.lax.convert_element_type(y, s.operand)
        for y, s in zip(arrays, summations, strict=True)
    ]
    dtypes, sums = [s.result for s in summations], [s.total for s in summations]
    argument = Argument(name, arrays, tree, metadata, num_rows, dtypes, sums)
    return argument._replace(capacity_name=f"{prefix}capacity", weights=weights)


def _prefix(name: str) -> str:
    """Returns how the names of an argument's options begin: q_metadata belongs to q."""
    return f"{name}_" if name in ("q", "kv") else ""


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
    check_summable(op, operand)
    if dtype.kind == "c" and result.kind != "c":
        raise TypeError(
            f"{op}: preferred_element_type is {result.name} but the rows are {dtype.name}, whose "
            "imaginary parts would be lost. Pass a complex dtype, or the real parts."
        )
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
