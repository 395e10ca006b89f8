"""The attention that one rank computes, without exchanges: a program that runs on one device.

The programs call the functions of attention itself, with the key ranges of a rank. The rows that a
rank would receive may have any values: only their number and the ranges determine the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.attention.algorithms import Rotating
from jax_cp_dispatch.attention.local.check_operands import check_operands
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.planned.call import attend_locally, attend_locally_backward
from jax_cp_dispatch.attention.rotating.attend import (
    TokenRanges,
    backward as gradients_of_rank,
    forward,
)
from jax_cp_dispatch.attention.rotating.call import sharded_sequence
from jax_cp_dispatch.attention.rotating.schedule_of import schedule_of
from jax_cp_dispatch.attention.rotating.schedules import OneRank
from jax_cp_dispatch.attention.rotating.sequence import ranges_of_rows
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.documents.ranges import attended_tokens
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.masks.pairs import pairs_per_query
from jax_cp_dispatch.planner import Plan

Shape = jax.ShapeDtypeStruct


class RankProgram(NamedTuple):
    """A program of one rank, and what differs between the ranks.

    Attributes:
      run: takes a rank, q, k and v, and these ranges. Returns the output and its
        lse; with the backward pass, the output and the gradients of q, k and v, where the gradient
        of the output is the output itself.
      shapes: of q, k and v.
      ranges: of each rank, what its queries see.
      num_pairs: query-key pairs of each rank.
    """

    run: Callable[..., Any]
    shapes: Sequence[Shape]
    ranges: Sequence[MaskRanges | TokenRanges]
    num_pairs: Int[np.ndarray, " W"]


def planned_program(
    options: AttentionOptions, plan: Plan, qkv: list[Shape], *, backward: bool
) -> RankProgram:
    """Returns the program of balanced or placed attention, for rows like those of `qkv`."""
    check_operands(options.op, *qkv)

    def run(rank, q, k, v, ranges):
        out, lse = attend_locally(options, q, k, v, ranges)
        if not backward:
            return out, lse
        return out, *attend_locally_backward(options, q, k, v, ranges, out, lse, out)

    ranges = [
        MaskRanges(*(x[None] for x in plan.local_ranges(rank))) for rank in range(plan.world_size)
    ]
    rows = ranges[0].k_start.shape[1], plan.kv_capacity, plan.kv_capacity
    shapes = [Shape((1, n, *x.shape[2:]), x.dtype) for n, x in zip(rows, qkv, strict=True)]
    return RankProgram(run, shapes, ranges, np.asarray(plan.pairs).astype(np.int64))


def rotating_program(
    options: AttentionOptions,
    algorithm: Rotating,
    qkv: list[Shape],
    packed: PackedMask,
    num_ranks: int,
    *,
    backward: bool,
) -> RankProgram:
    """Returns the program of a ring, or Hamilton attention, for one rank's rows `qkv`.

    Tokens are in the order that the algorithm computes, as in `layout="zigzag"`.
    """
    schedule = schedule_of(options.op, algorithm, num_ranks)
    sequence = sharded_sequence(options, algorithm, schedule, packed.mask)
    rotation = sequence.rotation(*qkv)

    rotation = dataclasses.replace(rotation, schedule=OneRank(rotation.schedule))

    def run(rank, q, k, v, of_tokens):
        operands = Operands(q, k, v)
        out, lse, _ = forward(rotation, operands, of_tokens, rank)
        if not backward:
            return out, lse
        outputs = out, lse, out.astype(q.dtype)
        dq, dkv, _ = gradients_of_rank(rotation, operands, of_tokens, outputs, rank)
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
