"""The attention that one rank computes, without exchanges: a program that runs on one device.

The programs call the functions of attention itself, with the key ranges of a rank. The rows that a
rank would receive may have any values: only their number and the ranges determine the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.attention.algorithms.by_plan import BLOCK_ROWS
from jax_cp_dispatch.attention.algorithms.exchange_once import attend_rows, row_gradients
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.local.backward import SoftmaxGradients
from jax_cp_dispatch.attention.local.check_operands import check_operands
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.planning import Plan

Shape = jax.ShapeDtypeStruct


class Batch(NamedTuple):
    """The batch of a profile.

    Attributes:
      num_ranks: W.
      packed: the mask and the documents `[B, W * T]`, on the host.
      qkv: shapes of q, k and v of one rank, `[B, T, heads, H]`.
      plan: of all ranks, or None.
    """

    num_ranks: int
    packed: PackedMask
    qkv: list[Shape]
    plan: Any = None


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
    ranges: Sequence[Any]
    num_pairs: Int[np.ndarray, " W"]


def planned_program(
    options: AttentionOptions, plan: Plan, qkv: list[Shape], *, backward: bool
) -> RankProgram:
    """Returns the program of attention by a plan, for rows like those of `qkv`."""
    check_operands(options.op, *qkv)

    def run(rank, q, k, v, ranges):
        out, lse, _ = attend_rows(options, BLOCK_ROWS, q, (k, v), ranges)
        if not backward:
            return out, lse
        whole = SoftmaxGradients(out, lse, out)
        return out, *row_gradients(options, BLOCK_ROWS, q, (k, v), ranges, whole)

    ranges = [
        MaskRanges(*(x[None] for x in plan.local_ranges(rank))) for rank in range(plan.world_size)
    ]
    rows = ranges[0].k_start.shape[1], plan.kv_capacity, plan.kv_capacity
    shapes = [Shape((1, n, *x.shape[2:]), x.dtype) for n, x in zip(rows, qkv, strict=True)]
    return RankProgram(run, shapes, ranges, np.asarray(plan.pairs).astype(np.int64))
