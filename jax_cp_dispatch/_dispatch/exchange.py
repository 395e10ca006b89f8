"""The static parts of one exchange, the order of its operands, and its four primitives.

Operands: the metadata of every group, then the fingerprint of every group that has one, then the
arrays of every group, then for `dispatch`, maybe, storage to reuse (one for each array).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_cp_dispatch._ranks.communicator import Communicator

dispatch_p, combine_p = Primitive("dispatch"), Primitive("combine")
start_p, done_p = Primitive("exchange_start"), Primitive("exchange_done")

# Dtypes of the native summation; bfloat16 and float16 accumulate in float32.
COMBINE_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


def summable(dtype: Any) -> Any:
    """Returns the dtype for the native summation: float32 for one-byte floats."""
    is_known = dtype.name in COMBINE_DTYPES or not jnp.issubdtype(dtype, jnp.floating)
    return dtype if is_known else jnp.dtype(jnp.float32)


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
    def fields(self) -> list[str]:
        """The names of the metadata's arrays."""
        optional = {"src_offset": self.has_src_offset, "weights": self.has_weights}
        return [name for name in MetadataOperands._fields if optional.get(name, True)]


@runtime_checkable
class Collectives(Protocol):
    """A plan as XLA collectives; hashable, and equal if it moves the same."""

    def __call__(self, arrays: Sequence[Any]) -> list[Any]: ...

    def transposed(self) -> "Collectives": ...


class Exchange(NamedTuple):
    """The static parts of one call of a primitive.

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
    def primitive(self) -> Primitive:
        """That of the whole exchange, in one call."""
        return dispatch_p if self.sums is None else combine_p

    @property
    def num_before_arrays(self) -> int:
        """The number of operands before the arrays: metadata and fingerprints of all groups."""
        return sum(len(group.fields) + group.has_fingerprint for group in self.groups)

    @property
    def num_arrays(self) -> int:
        return sum(group.num_arrays for group in self.groups)

    @property
    def result_rows(self) -> list[int]:
        """The rows of each result, in arrays of this rank or of all."""
        num_held = self.comm.num_ranks if self.is_global else 1
        of = lambda group: group.capacity if self.sums is None else group.num_tokens
        return [num_held * of(group) for group in self.groups for _ in range(group.num_arrays)]

    def inside(self, mesh: Any) -> "Exchange":
        """Returns the exchange of one rank, with all axes of `mesh` manual."""
        return self._replace(comm=self.comm.inside(mesh), is_global=False, mesh=None)

    def by_group(self, per_array: Sequence[Any]) -> list[list[Any]]:
        """Separates values of the arrays by group."""
        rest = list(per_array)
        return [_take(rest, group.num_arrays) for group in self.groups]


class ExchangeOperands(NamedTuple):
    """The operands of an exchange, or other values in the same order."""

    metadata: list[MetadataOperands]  # per group
    # Per group, None where there is none: i32 [9], see csrc/dispatch/dispatch.h.
    fingerprints: list[Any]
    arrays: list[Any]  # of all groups
    storage: list[Any]

    @classmethod
    def read(cls, operands: Sequence[Any], exchange: Exchange) -> "ExchangeOperands":
        """Separates flat operands, or other values in their order."""
        rest = list(operands)
        metadata = [
            MetadataOperands(**dict(zip(group.fields, _take(rest, len(group.fields)), strict=True)))
            for group in exchange.groups
        ]
        fingerprints = [rest.pop(0) if group.has_fingerprint else None for group in exchange.groups]
        return cls(metadata, fingerprints, _take(rest, exchange.num_arrays), rest)

    def flat(self) -> list[Any]:
        fields = [field for metadata in self.metadata for field in metadata.present()]
        fingerprints = [x for x in self.fingerprints if x is not None]
        return [*fields, *fingerprints, *self.arrays, *self.storage]

    def select(
        self, exchange: Exchange, keep: Sequence[bool]
    ) -> tuple["ExchangeOperands", Exchange]:
        """Returns the exchange of some of the arrays, without storage and without empty groups."""
        counts = [sum(flags) for flags in exchange.by_group(keep)]
        kept = lambda values, flags: [x for x, flag in zip(values, flags, strict=True) if flag]
        groups = zip(exchange.groups, counts, strict=True)
        exchange = exchange._replace(
            groups=tuple(group._replace(num_arrays=count) for group, count in groups if count),
            sums=exchange.sums and tuple(kept(exchange.sums, keep)),
        )
        metadata, fingerprints = kept(self.metadata, counts), kept(self.fingerprints, counts)
        return ExchangeOperands(metadata, fingerprints, kept(self.arrays, keep), []), exchange


def _take(rest: list[Any], num: int) -> list[Any]:
    taken = rest[:num]
    del rest[:num]
    return taken
