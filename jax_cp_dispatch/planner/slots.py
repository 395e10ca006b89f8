"""Metadata of transfers that are traced: one slot for each range that a rank sends.

Queries and keys are numbered and written together: each sort, scatter and running sum takes time to
compile, so there is one for both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.blocks import running_sum_by_key, sum_by_key
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
    first = is_first.astype(jnp.int32)
    (number,) = running_sum_by_key([first], sender, num_senders)
    (counts,) = sum_by_key([first], sender, num_senders)
    slot = number - 1
    ends = np.cumsum(sizes)
    parts = (jnp.split(x, ends[:-1]) for x in (slot, is_first))
    counts = counts.reshape(len(kinds), world_size)
    return tuple(map(Slots, *parts, counts))


def to_metadata(kinds: Sequence[Sent], world_size: int) -> list[Metadata]:
    """Returns the metadata of each kind; counts also contain what is not sent, or in no slot."""
    offsets = (world_size * np.cumsum([0, *(x.num_slots for x in kinds)])).tolist()
    end = offsets[-1] + len(kinds) * world_size**2  # out of bounds: dropped
    cells, pairs = [], []
    for number, (transfers, slots, is_sent, num_slots) in enumerate(kinds):
        is_used = transfers.source < world_size
        has_cell = is_used & (slots.slot < num_slots)
        if is_sent is not None:
            has_cell &= is_sent
        cell = offsets[number] + transfers.source * num_slots + slots.slot
        cells.append(jnp.where(has_cell, cell, end))
        pair = (number * world_size + transfers.target) * world_size + transfers.source
        pairs.append(jnp.where(is_used, offsets[-1] + pair, end))
    cell, pair = map(jnp.concatenate, (cells, pairs))
    is_first = jnp.concatenate([x.slots.is_first for x in kinds])
    joined = zip(*(x.transfers for x in kinds), strict=True)
    _, target, source_row, target_row, tokens = map(jnp.concatenate, joined)

    # One sum writes all: a slot's first transfer gives it all but its length, to which each adds.
    values = (target + 1, target_row, source_row)
    values = jnp.stack([tokens, *(jnp.where(is_first, x, 0) for x in values)], -1)
    of_pair = jnp.pad(tokens[:, None], ((0, 0), (0, 3)))
    table = jnp.zeros((end, 4), jnp.int32)
    table = table.at[jnp.concatenate([cell, pair])].add(
        jnp.concatenate([values, of_pair]), mode="drop"
    )
    received = table[offsets[-1] :, 0].reshape(len(kinds), world_size, world_size)
    total = received.sum(2, dtype=jnp.int32)
    received = jnp.concatenate([received, total[..., None]], axis=2).astype(jnp.uint32)
    metadata = []
    for number, kind in enumerate(kinds):
        at = slice(offsets[number], offsets[number + 1])
        by_slot = lambda x, at=at, n=kind.num_slots: x[at].reshape(world_size, n)
        metadata.append(
            Metadata(
                dst_rank=by_slot(table[:, 1]) - 1,
                dst_offset=by_slot(table[:, 2]).astype(jnp.uint32),
                seq_len=by_slot(table[:, 0]).astype(jnp.uint32),
                src_offset=by_slot(table[:, 3]).astype(jnp.uint32),
                num_recv_tokens=received[number],
                num_seqs=jnp.minimum(kind.slots.counts, kind.num_slots),
                num_total_recv_tokens=total[number].astype(jnp.uint32),
                world_size=world_size,
            )
        )
    return metadata
