"""One call of an algorithm with rotating keys: checks its options and makes its schedule."""

from __future__ import annotations

from jax_cp_dispatch._ranks.axis import num_ranks_here
from jax_cp_dispatch.attention.algorithms import Ring, Rotating
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.rotating.schedule_of import schedule_of
from jax_cp_dispatch.attention.rotating.schedules import Schedule
from jax_cp_dispatch.attention.rotating.sequence import ShardedSequence, attend_sequence
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.masks import Mask


def rotating_attention(
    options: AttentionOptions,
    algorithm: Rotating,
    operands: Operands,
    packed: PackedMask,
) -> Outputs:
    """`ring_attention` and its variants with options, which name the public function."""
    instead = f"context_parallel_attention(..., algorithm={algorithm.name!r})"
    num_ranks = num_ranks_here(options.op, options.exchange.axis_name, instead)
    schedule = schedule_of(options.op, algorithm, num_ranks)
    sequence = sharded_sequence(options, algorithm, schedule, packed.mask)
    return attend_sequence(sequence, operands, packed)


def sharded_sequence(
    options: AttentionOptions, algorithm: Rotating, schedule: Schedule, mask: Mask
) -> ShardedSequence:
    """Describes the sequence; a causal mask uses zigzag layout, except in a plain ring."""
    return ShardedSequence(options, schedule, mask.is_causal and not isinstance(algorithm, Ring))
