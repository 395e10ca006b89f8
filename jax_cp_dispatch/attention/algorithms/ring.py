"""`Ring` and `Zigzag`: keys and values rotate through the ranks as a whole."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm
from jax_cp_dispatch.attention.algorithms.rank_program import Batch, RankProgram, Shape
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.attention.rotating import attend as rotating
from jax_cp_dispatch.attention.rotating.schedules import CycleSchedule, OneRank, Schedule
from jax_cp_dispatch.attention.rotating.sequence import (
    ShardedSequence,
    attend_sequence,
    ranges_of_rows,
)
from jax_cp_dispatch.documents.ranges import PackedMask, attended_tokens
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.pairs import pairs_per_query


@dataclasses.dataclass(frozen=True)
class RingFamily(Algorithm):
    """Keys and values rotate; queries stay, and their softmax grows step by step.

    In each of n steps, a rank computes attention over the keys and values that it holds and sends
    them on. There are n - 1 exchanges, each started before the step's attention. In the backward
    pass, keys and values rotate again, and their gradients with them in float32 (n exchanges).
    Residuals per rank: q, k, v, the unrounded output, its lse, and the ranges of its rows.

    Rows of padding are not read, even if they contain NaN. A NaN in a token may reach tokens of
    other documents in the same block.
    """

    def schedule(self, op: str, num_ranks: int) -> Schedule:
        """Returns which rank holds what at each step."""
        return CycleSchedule((tuple(range(num_ranks)),))  # one chunk, from each rank to the next

    def computes_in_zigzag(self, mask: Mask) -> bool:
        """Whether contiguous rows are rearranged first, and the output back."""
        return mask.is_causal

    def sequence(self, options: AttentionOptions, mask: Mask, num_ranks: int) -> ShardedSequence:
        """Describes the sequence and its rotation."""
        schedule = self.schedule(options.op, num_ranks)
        return ShardedSequence(options, schedule, self.computes_in_zigzag(mask))

    def attend(
        self, options: AttentionOptions, operands: Operands, packed: PackedMask, plan: Any
    ) -> Outputs:
        num_ranks = jax.lax.axis_size(options.exchange.axis_name)
        sequence = self.sequence(options, packed.mask, num_ranks)
        return attend_sequence(sequence, operands, packed)

    def rank_program(
        self, options: AttentionOptions, batch: Batch, *, backward: bool
    ) -> RankProgram:
        """Of tokens in the order that the algorithm computes, as in zigzag layout."""
        num_ranks, packed, qkv, _ = batch
        rotation = self.sequence(options, packed.mask, num_ranks).rotation(*qkv)
        rotation = dataclasses.replace(rotation, schedule=OneRank(rotation.schedule))

        def run(rank, q, k, v, of_tokens):
            operands = Operands(q, k, v)
            out, lse, _ = rotating.forward(rotation, operands, of_tokens, rank)
            if not backward:
                return out, lse
            outputs = out, lse, out.astype(q.dtype)
            dq, dkv, _ = rotating.backward(rotation, operands, of_tokens, outputs, rank)
            return out, dq, *dkv

        packed = jax.tree.map(jnp.asarray, packed)
        seen = attended_tokens(packed, packed.segment_ids.shape)
        tokens = [np.asarray(rotation.layout.positions(rank)) for rank in range(num_ranks)]
        ranges = [ranges_of_rows(packed.mask, seen, token) for token in tokens]
        pairs = pairs_per_query(jax.tree.map(np.asarray, seen)).sum(0)
        of_ranks = np.array([pairs[token[token >= 0]].sum() for token in tokens])
        missing = rotation.layout.num_rows - qkv[0].shape[1]
        shapes = [Shape((x.shape[0], x.shape[1] + missing, *x.shape[2:]), x.dtype) for x in qkv]
        return RankProgram(run, shapes, ranges, of_ranks)


@dataclasses.dataclass(frozen=True)
class Ring(RingFamily):
    """Keys and values rotate through the ranks as a whole.

    Use it for attention that is not causal, and if tokens cannot be rearranged: nothing else moves.
    With causal attention of contiguous parts, the last rank works at every step but the first rank
    at only one. For its steps, its derivative and its residuals, see `RingFamily`.

    References:
      Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers (arXiv:2310.01889).
    """

    name: ClassVar[str] = "ring"

    def computes_in_zigzag(self, mask: Mask) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Zigzag(RingFamily):
    """A ring in zigzag layout: equal causal work for all ranks at every step.

    The sequence is cut into 2 n blocks; rank r computes blocks r and 2 n - 1 - r. Contiguous rows
    are first rearranged, and the output is rearranged back, which moves q, k, v and out once each;
    rows in zigzag order are not. Use it for causal attention of long documents. Documents that do
    not span the sequence cause unequal work in any fixed layout; see `Balanced`.

    References:
      Zhu, ring-flash-attention (zigzag); Fang and Zhao, USP (arXiv:2405.07719), section 4.
    """

    name: ClassVar[str] = "zigzag"
