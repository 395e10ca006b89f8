"""Metadata of transfers that are traced: one slot for each range that a rank sends.

Queries and keys are numbered and written together: each sort, scatter and running sum takes time to
compile, so there is one for both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.blocks import running_sum
from jax_cp_dispatch.planner.transfers import Transfers


class Slots(NamedTuple):
    """The slot of each transfer at its sender; adjacent transfers share a slot."""

    slot: Int32[Array, " X"]
    is_first: Bool[Array, " X"]  # of its slot
    counts: Int32[Array, " W"]  # slots of each sender


class Sent(NamedTuple):
    """Transfers of one kind of row, and the slots of the metadata that describes them."""

    transfers: Transfers
    slots: Slots
    is_sent: Bool[Array, " X"] | None  # None: all
    num_slots: int


def by_sender(kinds: Sequence[Transfers], world_size: int) -> tuple[Slots, ...]:
    """Numbers the slots of each sender, for each kind, in the order of the transfers."""
    sizes = [len(x.source) for x in kinds]
    source, target, source_row, target_row, tokens = map(jnp.concatenate, zip(*kinds, strict=True))
    kind = np.repeat(np.arange(len(kinds), dtype=np.int32), sizes)
    is_used = source < world_size
    num_senders = len(kinds) * world_size
    sender = jnp.where(is_used, kind * world_size + source, num_senders)
    follows = (
        (sender[1:] == sender[:-1])
        & (target[1:] == target[:-1])
        & (source_row[1:] == source_row[:-1] + tokens[:-1])
        & (target_row[1:] == target_row[:-1] + tokens[:-1])
    )
    is_first = jnp.pad(~follows, (1, 0), constant_values=True) & is_used
    place = jnp.arange(len(source), dtype=jnp.int32)
    sender, place, first = jax.lax.sort((sender, place, is_first), num_keys=1)
    first = first.astype(jnp.int32)
    counts = jnp.zeros(num_senders, jnp.int32).at[sender].add(first, mode="drop")
    before = running_sum(counts) - counts
    number = running_sum(first) - 1 - jnp.pad(before, (0, 1))[sender]
    _, slot = jax.lax.sort((place, number), num_keys=1)
    ends = np.cumsum(sizes)
    parts = (jnp.split(x, ends[:-1]) for x in (slot, is_first))
    counts = counts.reshape(len(kinds), world_size)
    return tuple(map(Slots, *parts, counts))


def to_metadata(kinds: Sequence[Sent], world_size: int) -> list[Metadata]:
    """Returns the metadata of each kind; counts also contain what is not sent, or in no slot."""
    offsets = world_size * np.cumsum([0, *(x.num_slots for x in kinds)])
    cells, firsts, pairs = [], [], []
    for number, (transfers, slots, is_sent, num_slots) in enumerate(kinds):
        is_used = transfers.source < world_size
        has_cell = is_used & (slots.slot < num_slots)
        if is_sent is not None:
            has_cell &= is_sent
        cell = offsets[number] + transfers.source * num_slots + slots.slot
        cells.append(jnp.where(has_cell, cell, offsets[-1]))  # out of bounds: dropped
        firsts.append(jnp.where(slots.is_first, cells[-1], offsets[-1]))
        pair = (number * world_size + transfers.target) * world_size + transfers.source
        pairs.append(jnp.where(is_used, pair, len(kinds) * world_size**2))
    cell, first, pair = map(jnp.concatenate, (cells, firsts, pairs))
    joined = zip(*(x.transfers for x in kinds), strict=True)
    _, target, source_row, target_row, tokens = map(jnp.concatenate, joined)

    table = jnp.broadcast_to(jnp.array([-1, 0, 0], jnp.int32), (offsets[-1], 3))
    values = jnp.stack([target, target_row, source_row], -1)
    table = table.at[first].set(values, mode="drop")
    lengths = jnp.zeros(offsets[-1], jnp.int32).at[cell].add(tokens, mode="drop")
    received = jnp.zeros(len(kinds) * world_size**2, jnp.int32).at[pair].add(tokens, mode="drop")
    received = received.reshape(len(kinds), world_size, world_size)
    total = received.sum(2, dtype=jnp.int32)
    received = jnp.concatenate([received, total[..., None]], axis=2).astype(jnp.uint32)
    metadata = []
    for number, kind in enumerate(kinds):
        at = slice(offsets[number], offsets[number + 1])
        by_slot = lambda x, at=at, n=kind.num_slots: x[at].reshape(world_size, n)
        metadata.append(
            Metadata(
                dst_rank=by_slot(table[:, 0]),
                dst_offset=by_slot(table[:, 1]).astype(jnp.uint32),
                seq_len=by_slot(lengths).astype(jnp.uint32),
                src_offset=by_slot(table[:, 2]).astype(jnp.uint32),
                num_recv_tokens=received[number],
                num_seqs=jnp.minimum(kind.slots.counts, kind.num_slots),
                num_total_recv_tokens=total[number].astype(jnp.uint32),
                world_size=world_size,
            )
        )
    return metadata
