"""The static parts of one call of the primitives, and the order of its operands.

Operands: the metadata of every part, then the stamp of every part that has one, then the arrays of
every part, then for `dispatch`, maybe, storage to reuse (one for each array).
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

    def present(self) -> list[Any]:
        return [field for field in self if field is not None]


class Part(NamedTuple):
    """Arrays that move by the same metadata."""

    num_arrays: int
    num_tokens: int  # rows per rank in the owner's layout
    capacity: int  # rows per rank of the receive buffer
    has_src_offset: bool
    buffer: int = 0  # id of the registered buffer whose limits apply; 0: none
    capacity_name: str = "capacity"  # the argument that sets the capacity, for messages
    has_stamp: bool = False

    @property
    def num_fields(self) -> int:
        """The number of arrays of the metadata that are operands."""
        return 4 + self.has_src_offset


def num_before_arrays(parts: Sequence[Part]) -> int:
    """Counts the operands before the arrays: metadata and stamps of all parts."""
    return sum(part.num_fields + part.has_stamp for part in parts)


@runtime_checkable
class Collectives(Protocol):
    """A plan as XLA collectives; hashable, and equal if it moves the same."""

    def __call__(self, arrays: Sequence[Any]) -> list[Any]: ...

    def transposed(self) -> "Collectives": ...


class Call(NamedTuple):
    """The common properties of all parts of a call."""

    op: str  # the function that was called, for messages
    comm: Communicator
    is_global: bool = False  # arrays of all ranks, to be split; else this rank's
    by_collectives: "Collectives | None" = None  # cheaper than collectives for any plan

    def inside(self, mesh: Any) -> "Call":
        """Returns the call of one rank, with all axes of `mesh` manual."""
        return self._replace(comm=self.comm.inside(mesh), is_global=False)


class Operands(NamedTuple):
    """The operands of a call, or other values in the same order."""

    metadata: list[MetadataOperands]  # per part
    stamps: list[Any]  # per part, None where there is none: i32 [7], see csrc/dispatch/dispatch.h
    arrays: list[Any]  # of all parts
    storage: list[Any]

    def flat(self) -> list[Any]:
        fields = [field for metadata in self.metadata for field in metadata.present()]
        return [*fields, *(x for x in self.stamps if x is not None), *self.arrays, *self.storage]


def read_operands(operands: Sequence[Any], parts: Sequence[Part]) -> Operands:
    """Groups flat operands, or other values in their order."""
    rest = list(operands)
    metadata = [MetadataOperands(*_take(rest, part.num_fields)) for part in parts]
    stamps = [_take(rest, 1)[0] if part.has_stamp else None for part in parts]
    arrays = _take(rest, sum(part.num_arrays for part in parts))
    return Operands(metadata, stamps, arrays, rest)


def by_part(per_array: Sequence[Any], parts: Sequence[Part]) -> list[list[Any]]:
    """Groups per-array values by part."""
    rest = list(per_array)
    return [_take(rest, part.num_arrays) for part in parts]


def _take(rest: list[Any], num: int) -> list[Any]:
    taken = rest[:num]
    del rest[:num]
    return taken


def part_of_each(parts: Sequence[Part]) -> list[Part]:
    """Returns the part of each array."""
    return [part for part in parts for _ in range(part.num_arrays)]


def select_arrays(
    operands: Operands, parts: Sequence[Part], keep: Sequence[bool]
) -> tuple[Operands, tuple[Part, ...]]:
    """Returns the call with some of its arrays, without storage and without empty parts."""
    counts = [sum(flags) for flags in by_part(keep, parts)]
    return operands._replace(
        metadata=[m for m, count in zip(operands.metadata, counts, strict=True) if count],
        stamps=[x for x, count in zip(operands.stamps, counts, strict=True) if count],
        arrays=[x for x, kept in zip(operands.arrays, keep, strict=True) if kept],
        storage=[],
    ), tuple(
        part._replace(num_arrays=count) for part, count in zip(parts, counts, strict=True) if count
    )


def summable(dtype: Any) -> Any:
    """Returns the dtype for the native summation: float32 for one-byte floats."""
    is_known = dtype.name in COMBINE_DTYPES or not jnp.issubdtype(dtype, jnp.floating)
    return dtype if is_known else jnp.dtype(jnp.float32)
