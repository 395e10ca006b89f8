"""Reads the metadata of an exchange: checks its fields, and makes operands of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_cp_dispatch._dispatch.exchange_operands import MetadataOperands
from jax_cp_dispatch._dtypes import index_dtype
from jax_cp_dispatch.metadata import Metadata


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
    fields = MetadataOperands(*(getattr(metadata, name) for name in MetadataOperands._fields))
    shapes = tuple(field if field is None else (field.shape, field.dtype) for field in fields)
    leading, is_empty, is_narrow = _check_fields(op, num_ranks, all_ranks, *shapes)
    if is_narrow:
        fields = jax.tree.map(lambda x: x.astype(index_dtype(x.dtype)), fields)
    if not is_empty:
        return fields
    # One slot of padding, because an empty operand crashes jaxlib 0.11.
    none = jnp.zeros((*leading, 1), jnp.int32)
    return MetadataOperands(fields.num_recv_tokens, none, none - 1, none)


@functools.lru_cache(maxsize=1024)  # a model makes the same call in every layer
def _check_fields(op: str, num_ranks: int, all_ranks: bool, *given: Any) -> tuple[Any, bool, bool]:
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
    is_narrow = any(dtype.itemsize < 4 for _, dtype in fields.values())
    return leading, 0 in dst_rank, is_narrow
