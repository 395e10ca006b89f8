"""`Ring` and `Zigzag`: keys and values rotate through the ranks as a whole."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

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
from jax_cp_dispatch.cost import Hardware, Moves, StepCost, Traffic, Workload
from jax_cp_dispatch.cost.pairs import decisive_pairs, pairs_between_ranks
from jax_cp_dispatch.cost.steps import attention_seconds, step_cost
from jax_cp_dispatch.cost.traffic import NEXT_RANK, Receivers
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

    def _steps(
        self, workload: Workload, hardware: Hardware, moves: Moves | None, *, backward: bool
    ) -> list[StepCost]:
        """n computations; during all but the last, keys and values move.

        Backward, their gradients also move, n times, in float32, each during the computation after
        the one that produces it.
        """
        others, rows = workload.num_ranks - 1, workload.rows_per_rank
        kv, dkv = workload.kv_bytes(rows), workload.kv_bytes(rows, itemsize=4)
        compute = attention_seconds(
            self._pairs(workload, hardware),
            *(workload, hardware),
            q_rows=rows,
            kv_rows=rows,
            backward=backward,
        )
        sent = [kv] * others + [0]
        if backward and others:
            sent = [kv, *[kv + dkv] * (others - 1), dkv, dkv]
            compute = np.append(compute, 0.0)
        return [
            step_cost(float(seconds), *self._sent(x, workload, hardware), workload, hardware)
            for seconds, x in zip(compute, sent, strict=True)
        ]

    def _pairs(self, workload: Workload, hardware: Hardware) -> Float64[np.ndarray, " num_ranks"]:
        pairs = pairs_between_ranks(workload, zigzag=self.computes_in_zigzag(workload.visible))
        rank = np.arange(workload.num_ranks)
        return np.array([decisive_pairs(pairs[rank, rank - step], hardware) for step in rank])

    def _sent(
        self, num_bytes: int | float, workload: Workload, hardware: Hardware
    ) -> tuple[Traffic, Receivers]:
        """Returns the traffic of a step in which each rank sends to the next."""
        size = hardware.node_size(workload.num_ranks)
        if size == workload.num_ranks:
            return Traffic(float(num_bytes), 0.0, float(num_bytes), 0.0), NEXT_RANK
        inside = num_bytes if size > 1 else 0.0  # the last rank of a node sends to the next node
        means = num_bytes * (1 - 1 / size), num_bytes / size
        return Traffic(*means, inside, float(num_bytes)), NEXT_RANK

    def rearrangement_seconds(
        self, workload: Workload, hardware: Hardware, *, layout: str, with_backward: bool
    ) -> float:
        """Of q, k and v to zigzag order, and of out back, half to each of two ranks.

        The backward pass rearranges dout, and dq, dk and dv back.
        """
        num_ranks, rows = workload.num_ranks, workload.rows_per_rank
        is_there = layout == "zigzag" or not self.computes_in_zigzag(workload.visible)
        if is_there or num_ranks == 1:
            return 0.0
        q, kv = workload.q_bytes(rows), workload.kv_bytes(rows)
        inside = hardware.node_size(num_ranks) == num_ranks
        where = {"inside": 2} if inside else {"outside": 2}
        there, back = (
            hardware.exchange_seconds(num_bytes / 2, num_ranks=num_ranks, **where)
            for num_bytes in (q + kv, q)
        )
        return (1 + with_backward) * (there + back)


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

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        return () if layout == "zigzag" else (cls(),)  # in this layout it is `Zigzag`


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
