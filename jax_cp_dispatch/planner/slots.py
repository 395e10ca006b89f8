"""Metadata of transfers that are traced: one slot for each range that a rank sends."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.blocks import running_sum
from jax_cp_dispatch.planner.transfers import Transfers


class Slots(NamedTuple):
    """The slot of each transfer at its sender; adjacent transfers share a slot."""

    slot: Int32[Array, " X"]
    is_first: Bool[Array, " X"]  # of its slot
    counts: Int32[Array, " W"]  # slots of each sender


def by_sender(transfers: Transfers, world_size: int) -> Slots:
    """Numbers the slots of each sender, in the order of the transfers."""
    source, target, source_row, target_row, tokens = transfers
    follows = (
        (source[1:] == source[:-1])
        & (target[1:] == target[:-1])
        & (source_row[1:] == source_row[:-1] + tokens[:-1])
        & (target_row[1:] == target_row[:-1] + tokens[:-1])
    )
    is_first = jnp.pad(~follows, (1, 0), constant_values=True) & (source < world_size)
    place = jnp.arange(source.shape[0], dtype=jnp.int32)
    source, place, first = jax.lax.sort((source, place, is_first), num_keys=1)
    first = first.astype(jnp.int32)
    number = running_sum(first) - 1
    counts = jnp.zeros(world_size, jnp.int32).at[source].add(first, mode="drop")
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    number = number - jnp.pad(before, (0, 1))[source]
    slot = jnp.zeros_like(number).at[place].set(number, unique_indices=True)
    return Slots(slot, is_first, counts)


def to_metadata(
    transfers: Transfers,
    *,
    world_size: int,
    num_slots: int,
    is_sent: Bool[Array, " X"] | None = None,
) -> Metadata:
    """Returns the metadata; the counts also contain what is not sent, or not in `num_slots`.

    `is_sent` of None: all transfers are.
    """
    slots = by_sender(transfers, world_size)
    source, slot = transfers.source, slots.slot
    if is_sent is not None:
        source = jnp.where(is_sent, source, world_size)
    first = jnp.where(slots.is_first, source, world_size)

    def of_first(values, fill, dtype):
        out = jnp.full((world_size, num_slots), fill, dtype)
        return out.at[first, slot].set(values.astype(dtype), mode="drop")

    tokens = jnp.zeros((world_size, world_size), jnp.int32)
    tokens = tokens.at[transfers.target, transfers.source].add(transfers.tokens, mode="drop")
    total = tokens.sum(1, dtype=jnp.int32)
    lengths = jnp.zeros((world_size, num_slots), jnp.int32)
    lengths = lengths.at[source, slot].add(transfers.tokens, mode="drop")
    return Metadata(
        dst_rank=of_first(transfers.target, -1, jnp.int32),
        dst_offset=of_first(transfers.target_row, 0, jnp.uint32),
        seq_len=lengths.astype(jnp.uint32),
        src_offset=of_first(transfers.source_row, 0, jnp.uint32),
        num_recv_tokens=jnp.concatenate([tokens, total[:, None]], axis=1).astype(jnp.uint32),
        num_seqs=jnp.minimum(slots.counts, num_slots),
        num_total_recv_tokens=total.astype(jnp.uint32),
        world_size=world_size,
    )
