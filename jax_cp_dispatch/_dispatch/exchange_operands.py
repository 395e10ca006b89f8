"""The static parts of one exchange, and the order of its operands.

Operands: the metadata of every group, then the fingerprint of every group that has one, then the
arrays of every group, then for `dispatch`, maybe, storage to reuse (one for each array).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from jax_cp_dispatch._ranks.communicator import Communicator

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
