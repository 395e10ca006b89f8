"""What an exchange is: the static parts of one call and its operands, made from arguments.

`outgoing` and `returning` trust their arrays and metadata, as exchanges inside the package do;
`read_outgoing` and `read_returning` check those of public calls.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jaxtyping import Array

from jax_cp_dispatch._arguments import check_rows
from jax_cp_dispatch._dispatch.buffers import buffer_limits, read_integer
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch.metadata import Metadata

# ---- The static parts of one exchange, and the order of its operands.
#
# Operands: the fields (the metadata of every group, then the fingerprint of every group that has
# one), then the arrays of every group, then for `dispatch`, maybe, storage to reuse (one for each
# array).

dispatch_p, combine_p = Primitive("dispatch"), Primitive("combine")
start_p, done_p = Primitive("exchange_start"), Primitive("exchange_done")

PLANNED = "num_recv_tokens", "seq_len", "dst_rank", "dst_offset", "src_offset"
"""What movement reads of metadata; `src_offset` may be None."""


class OperandGroup(NamedTuple):
    """Arrays that move by the same metadata.

    The names of the metadata's arrays are those of `PLANNED`, and "weights" of a combine that sums
    the rows of a token times these: it is in the caller's derivative rule, and not transposed.
    """

    num_arrays: int
    num_tokens: int  # rows per rank in the owner's layout
    capacity: int  # rows per rank of the receive buffer
    fields: tuple[str, ...]  # the names of the metadata's arrays
    buffer: int  # id of the registered buffer whose limits apply; 0: none
    capacity_name: str  # the argument that sets the capacity, for messages
    has_fingerprint: bool  # whether the ranks compare fingerprints of the plan


@runtime_checkable
class Collectives(Protocol):
    """A plan as XLA collectives; hashable, and equal if it moves the same."""

    def __call__(self, arrays: Sequence[Any]) -> list[Any]: ...

    def transposed(self) -> "Collectives": ...


class Exchange(NamedTuple):
    """The static parts of one call of a primitive."""

    op: str  # the function that was called, for messages
    comm: Communicator  # the ranks
    groups: tuple[OperandGroup, ...]  # of the operands
    # Names of the dtypes of the results of combine; None: dispatch
    sums: tuple[str, ...] | None = None
    # Whether arrays hold the rows of all ranks, to be split; else this rank's
    is_global: bool = False
    # The plan as collectives, cheaper than those for any plan
    by_collectives: Collectives | None = None
    # The abstract mesh of a global call that the partitioner splits, if it is known
    mesh: Any = None
    num_comm_sm: int | None = None  # multiprocessors of a GPU that it uses; None is the default

    @property
    def primitive(self) -> Primitive:
        """The primitive of the whole exchange, in one call."""
        return dispatch_p if self.sums is None else combine_p

    @property
    def num_arrays(self) -> int:
        return sum(group.num_arrays for group in self.groups)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Separates fields, arrays and further operands, or other values in their order."""
        begin = sum(len(group.fields) + group.has_fingerprint for group in self.groups)
        end = begin + self.num_arrays
        return list(operands[:begin]), list(operands[begin:end]), list(operands[end:])

    def by_group(self, per_array: Sequence[Any]) -> list[list[Any]]:
        """Separates values of the arrays by group."""
        rest = iter(per_array)
        return [list(itertools.islice(rest, group.num_arrays)) for group in self.groups]

    def select(
        self, fields: Sequence[Any], arrays: Sequence[Any], keep: Sequence[bool]
    ) -> tuple[list[Any], list[Any], "Exchange"]:
        """Returns the exchange of some of the arrays, without empty groups."""
        counts = [sum(flags) for flags in self.by_group(keep)]
        owners = [i for i, group in enumerate(self.groups) for _ in group.fields]
        owners += [i for i, group in enumerate(self.groups) if group.has_fingerprint]
        groups = zip(self.groups, counts, strict=True)
        kept = self._replace(
            groups=tuple(group._replace(num_arrays=count) for group, count in groups if count),
            sums=self.sums and tuple(itertools.compress(self.sums, keep)),
        )
        fields = [x for x, owner in zip(fields, owners, strict=True) if counts[owner]]
        return fields, list(itertools.compress(arrays, keep)), kept

    def inside(self, mesh: Any) -> Callable[..., list[Any]]:
        """Returns the call of one rank, with all axes of `mesh`, which has all ranks, manual."""
        num_devices = math.prod(mesh.shape[name] for name in self.comm.axis_names)
        check_world_size(self.op, self.comm.num_ranks, self.comm.axis_names, num_devices)
        own = self._replace(comm=self.comm.inside(mesh), is_global=False, mesh=None)
        return functools.partial(self.primitive.bind, exchange=own)


# ---- Arguments: arrays with their metadata.

Rows = Array | np.ndarray


class Argument(NamedTuple):
    """Arrays of one call that move by the same metadata."""

    arrays: list[Array]
    tree: Any  # the structure of arrays and results
    metadata: Metadata
    num_rows: int  # rows per rank of the results
    # Which results have elements. Others never reach a handler: jaxlib 0.11 crashes on a custom
    # call with an empty operand or result.
    moves: list[bool]
    dtypes: list[Any]  # of the results
    # Dtypes of the primitive's results, before the last rounding; None: `dispatch`
    sums: list[Any] | None = None
    capacity_name: str = "capacity"  # the argument that sets the capacity, for messages
    # This rank's fingerprint, i32 [9], or None; see csrc/dispatch/dispatch.h
    fingerprint: Array | None = None
    # Of each replica of the rows that return, or None. Those rows of a token that one rank holds
    # are summed first, times their weights, and rounded. It has no derivative then.
    weights: Array | None = None
    name: str = ""  # name of the argument of a public call, for messages
    buffer: int = 0  # id of a registered buffer; 0 is none
    storage: Any = None  # arrays that the results may reuse, in their structure, if any


def outgoing(
    x: Any,
    metadata: Metadata,
    *,
    capacity: int,
    capacity_name: str = "capacity",
    fingerprint: Array | None = None,
) -> Argument:
    """Returns an argument of `dispatch`."""
    leaves, tree = jax.tree.flatten(x)
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
    moves = [capacity > 0 and math.prod(x.shape[1:]) > 0 for x in arrays]
    dtypes = [x.dtype for x in arrays]
    named = capacity_name, fingerprint
    return Argument(arrays, tree, metadata, capacity, moves, dtypes, None, *named)


def returning(
    y: Any,
    metadata: Metadata,
    *,
    num_tokens: int,
    dtype: Any = None,
    capacity_name: str = "capacity",
    fingerprint: Array | None = None,
    weights: Array | None = None,
) -> Argument:
    """Returns an argument of `combine`."""
    named: Any = {"capacity_name": capacity_name, "fingerprint": fingerprint}
    argument = outgoing(y, metadata, capacity=num_tokens, **named)
    summations = [_summation(y.dtype, dtype) for y in argument.arrays]
    arrays = [
        y if y.dtype == s.operand else jax.lax.convert_element_type(y, s.operand)
        for y, s in zip(argument.arrays, summations, strict=True)
    ]
    dtypes, sums = [s.result for s in summations], [s.total for s in summations]
    return argument._replace(arrays=arrays, dtypes=dtypes, sums=sums, weights=weights)


class _Summation(NamedTuple):
    """The dtypes of a moved array, of its sum from the handler, and of the result."""

    operand: Any
    total: Any
    result: Any


def summable(dtype: Any) -> Any:
    """Returns the dtype for the native summation: float32 for one-byte floats."""
    is_small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
    return jnp.dtype(jnp.float32) if is_small else dtype


@functools.lru_cache(maxsize=1024)  # a model makes the same call in every layer
def _summation(dtype: Any, preferred: Any) -> _Summation:
    is_narrow = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    accumulated = lambda dtype: jnp.dtype(jnp.float32) if is_narrow(dtype) else dtype
    result, operand = jnp.dtype(preferred or dtype), summable(dtype)
    # A result that is wider, or no longer an integer, is summed in its dtype: y is cast first.
    summed, needed = accumulated(operand), accumulated(result)
    is_integer, is_real = (
        [jnp.issubdtype(dtype, kind) for dtype in (summed, needed)]
        for kind in (jnp.integer, jnp.floating)
    )
    is_alike = is_integer[0] == is_integer[1] and is_real[0] == is_real[1]
    if (is_alike and needed.itemsize > summed.itemsize) or (is_integer[0] and is_real[1]):
        operand = needed
    # The handler rounds to y's dtype or not at all; other dtypes are made from the unrounded sum.
    total = operand if operand == result else accumulated(operand)
    return _Summation(operand, total, result)


# ---- What a public call checks: of each argument, and then, with the ranks, of its sizes.

_MOST_BYTES = 2**48  # of one array; processors address no more


def read_outgoing(
    op: str, name: str, x: Any, metadata: Any, capacity: Any, buffer: Any, out: Any = None
) -> Argument:
    """Checks an argument of `dispatch`, whose arrays the door has checked."""
    prefix = _check_moving(op, name, x, metadata)
    if (capacity is None) == (buffer is None):
        raise ValueError(
            f"{op}: got {'neither' if buffer is None else 'both'} of {prefix}capacity and "
            f"{prefix}buffer; it needs exactly one of them."
        )
    if buffer is not None:
        num_rows = buffer_limits(op, buffer).capacity
    else:
        num_rows = _read_num_rows(op, f"{prefix}capacity", capacity)
    argument = outgoing(x, metadata, capacity=num_rows, capacity_name=f"{prefix}capacity")
    return argument._replace(name=name, buffer=buffer or 0, storage=out)


def read_returning(
    op: str, name: str, y: Any, metadata: Any, num_tokens: Any, dtype: Any, buffer: Any
) -> Argument:
    """Checks an argument of `combine`, whose arrays the door has checked."""
    prefix = _check_moving(op, name, y, metadata)
    num_rows = _read_num_rows(op, f"{prefix}num_tokens", num_tokens)
    if dtype is not None and jnp.dtype(dtype).kind != "c":
        for x in jax.tree.leaves(y):
            if x.dtype.kind == "c":
                raise TypeError(
                    f"{op}: preferred_element_type is {jnp.dtype(dtype).name} but the rows are "
                    f"{x.dtype.name}, whose imaginary parts would be lost. Pass a complex dtype, "
                    "or the real parts."
                )
    if buffer is not None:
        buffer_limits(op, buffer)
    argument = returning(
        y, metadata, num_tokens=num_rows, dtype=dtype, capacity_name=f"{prefix}capacity"
    )
    return argument._replace(name=name, buffer=buffer or 0)


def _check_moving(op: str, name: str, tree: Any, metadata: Any) -> str:
    """Checks an argument; returns how its options begin: q_metadata belongs to q."""
    prefix = f"{name}_" if name in ("q", "kv") else ""
    check_movable(op, name, tree)
    if not isinstance(metadata, Metadata):
        raise TypeError(
            f"{op}: {prefix}metadata is {type(metadata).__name__}; it needs to be Metadata. Pass "
            "one of the two that compute_metadata returns, or q_metadata or kv_metadata of a Plan."
        )
    return prefix


def check_movable(op: str, name: str, tree: Any) -> None:
    """Requires arrays of whole bytes."""
    for dtype in {x.dtype for x in jax.tree.leaves(tree)}:
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise TypeError(f"{op}: {name} has dtype {dtype}; move its data, not the keys.")
        info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
        if not jnp.issubdtype(dtype, jnp.bool_) and info(dtype).bits % 8:
            raise TypeError(
                f"{op}: {name} has dtype {dtype.name}, less than a byte per element, which "
                "cannot be addressed. Cast to int8, or pack two elements into one byte."
            )


def _read_num_rows(op: str, name: str, value: Any) -> int:
    num_rows = read_integer(op, name, value, "a static int, because it is a shape")
    if num_rows < 0:
        raise ValueError(f"{op}: {name} is {num_rows}; it needs to be at least 0 rows.")
    check_rows(op, name, num_rows)
    return num_rows


def check_world_size(op: str, planned: int, names: tuple[str, ...], num_devices: int) -> None:
    if planned != num_devices:
        raise ValueError(
            f"{op}: metadata is for world_size={planned} but axis {','.join(names)!r} has "
            f"{num_devices} devices. Plan with world_size={num_devices}."
        )


def check_sizes(op: str, argument: Argument, comm: Communicator, *, is_global: bool) -> None:
    """Checks the metadata and the sizes of an argument, now that the ranks are known."""
    metadata, num_ranks = argument.metadata, comm.num_ranks
    check_world_size(op, metadata.world_size, comm.axis_names, num_ranks)
    fields = (getattr(metadata, name) for name in PLANNED)
    given = (x if x is None else (x.shape, x.dtype) for x in fields)
    _check_fields(op, num_ranks, is_global, *given)
    if not any(argument.moves):
        return
    num_rows, factor = argument.arrays[0].shape[0], 1
    if is_global:
        num_rows, factor = rows_per_rank(op, argument.name, num_rows, num_ranks), num_ranks
    capacity = argument.num_rows if argument.sums is None else num_rows
    limit = buffer_limits(op, argument.buffer).capacity if argument.buffer else capacity
    if capacity > limit:
        raise ValueError(
            f"{op}: {argument.name} has {capacity} rows per rank but the capacity of buffer "
            f"{argument.buffer} is {limit}. Create another with capacity>={capacity}."
        )
    num_rows = factor * argument.num_rows
    row_bytes = (math.prod(x.shape[1:]) * x.dtype.itemsize for x in argument.arrays)
    num_bytes = num_rows * max(row_bytes)
    if num_bytes >= _MOST_BYTES:  # XLA aborts the process for sizes beyond 64 bits
        raise ValueError(
            f"{op}: {argument.name} goes to {argument.num_rows} rows per rank, so an array of the "
            f"result would take {num_bytes} bytes, more than any machine has. Pass no more rows "
            "than the largest num_total_recv_tokens."
        )
    if argument.storage is None:
        return
    storage, tree = jax.tree.flatten(argument.storage)
    known = [x for x in storage if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if any(x.is_deleted() for x in known):
        raise ValueError(
            f"{op}: out is deleted: it was donated to an earlier call, and stays deleted even if "
            "that call failed. Pass a new array, or omit out."
        )
    got = [(jnp.shape(x), jnp.result_type(x)) for x in storage]
    wanted = [((num_rows, *x.shape[1:]), x.dtype) for x in argument.arrays]
    if tree != argument.tree or got != wanted:
        shapes = lambda pairs: ", ".join(f"{d.name}{list(s)}" for s, d in pairs)
        raise ValueError(
            f"{op}: out holds {shapes(got)} but the result is {shapes(wanted)}. Pass an earlier "
            "result of the same call, or omit out."
        )


@functools.lru_cache(maxsize=1024)
def _check_fields(op: str, num_ranks: int, all_ranks: bool, *given: Any) -> None:
    named = zip(PLANNED, given, strict=True)
    fields = {name: field for name, field in named if field is not None}
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


def rows_per_rank(op: str, name: str, num_rows: int, num_ranks: int) -> int:
    """Returns the rows of each rank, from those of the arrays of all ranks."""
    if num_rows % num_ranks:
        raise ValueError(
            f"{op}: {name} has {num_rows} rows, not a multiple of the {num_ranks} ranks. "
            f"Outside shard_map, arrays hold the rows of all ranks, the same number for each: pad "
            f"them, or call {op} inside jax.shard_map."
        )
    return num_rows // num_ranks
