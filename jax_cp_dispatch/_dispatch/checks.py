"""Checks of the arrays and the metadata of an exchange."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from jax_cp_dispatch._arguments import check_rows, read_wide
from jax_cp_dispatch._dispatch.exchange_operands import COMBINE_DTYPES, MetadataOperands
from jax_cp_dispatch.metadata import Metadata

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
