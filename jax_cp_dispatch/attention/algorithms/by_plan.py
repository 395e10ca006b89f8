"""Attention by a plan: keys move to the queries, and queries to other ranks or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_cp_dispatch._dispatch import Argument, outgoing, returning
from jax_cp_dispatch._residuals import named_context, named_context_received
from jax_cp_dispatch.attention.algorithms.exchange_once import (
    Exchange,
    Heads,
    Movement,
    attend_rows,
    exchange_once,
    parts_of_heads,
    row_gradients,
)
from jax_cp_dispatch.attention.local.blockwise import SoftmaxGradients
from jax_cp_dispatch.attention.local.options import check_heads
from jax_cp_dispatch.attention.operands import AttentionOptions, Operands, Outputs
from jax_cp_dispatch.cost import Hardware, Moves, Workload, rows_by_link
from jax_cp_dispatch.documents.fingerprint import rank_fingerprint
from jax_cp_dispatch.documents.layouts import PackedMask
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.planning import Plan
from jax_cp_dispatch.planning.plan import plan_of_group

# Blocks of 256 rows, as in a ring, compute up to 40 % more pairs, each in less time: 0.99 to 1.02
# of the time, in the mean of 11 batches on 2 cores, with and without the backward pass.
BLOCK_ROWS = 128


def attend_by_plan(
    options: AttentionOptions,
    operands: Operands,
    plan: Plan,
    packed: PackedMask,
) -> Outputs:
    """Computes this rank's part of attention by a plan.

    Ranks compare the checksums of their plans, and of the ids, positions and mask of `packed`.
    """
    plan = plan_of_group(options.op, plan)
    check_plan_rows(options.op, operands, plan, packed)
    return _attend(PlannedMovement(options, not plan.is_placed), operands, plan, packed)


@partial(jax.jit, static_argnums=0)  # equal calls of a program are traced and lowered once
def _attend(
    movement: PlannedMovement, operands: Operands, plan: Plan, packed: PackedMask
) -> Outputs:
    """Attends the concatenated rows of all batch rows."""
    exchange = movement.options.exchange
    mask, segment_ids, positions = packed
    rank = jax.lax.axis_index(exchange.axis_name)
    arrays = plan, rank_fingerprint(plan.fingerprint, rank, segment_ids, positions, mask)
    q, k, v, *others = operands.varying(exchange)
    q, k, v = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v))
    outputs: Any = exchange_once(movement, Operands(q, k, v, *others), arrays)
    out, lse, max_logits = outputs
    by_batch = lambda x: x.reshape(*operands.q.shape[:2], *x.shape[1:])
    return Outputs(by_batch(out), None if lse is None else by_batch(lse), max_logits)


@dataclasses.dataclass(frozen=True)
class PlannedMovement(Movement):
    """Rows `[T, heads, H]` move as planned; `arrays` are the plan and what ranks compare.

    Errors of the exchanges refer to the config of the plan.

    Attributes:
      options: of the call.
      moves_queries: else they stay, and the output with them.
    """

    options: AttentionOptions
    moves_queries: bool
    block_rows = BLOCK_ROWS

    def parts(self, operands: Operands) -> list[Heads]:
        return parts_of_heads(self.options, operands)

    def ranges(self, arrays: Any) -> MaskRanges:
        plan, _ = arrays
        rank = jax.lax.axis_index(self.options.exchange.axis_name)
        return MaskRanges(*(x[None] for x in named_context(plan.local_ranges(rank))))

    def send(self, arrays: Any, part: Operands) -> Exchange:
        plan, fingerprint = arrays
        kv = self._outgoing(plan, "kv", part.moved)
        if not self.moves_queries:
            read = lambda came: _attended((part.q, named_context_received(came[0])))
            return Exchange([kv._replace(fingerprint=fingerprint)], read)
        q = self._outgoing(plan, "q", part.q)._replace(fingerprint=fingerprint)
        return Exchange([q, kv], lambda came: _attended(named_context_received(came)))

    def give_back(self, arrays: Any, out: Array, lse: Array) -> Exchange:
        # NaN for a wrong fingerprint, where there are no errors.
        plan, fingerprint = arrays
        if not self.moves_queries:
            return Exchange(None, lambda _: (out[0], lse[0].T if self.options.return_lse else None))
        if not self.options.return_lse:
            home = self._returning(plan, "q", out[0])
            read: Callable[[Any], Any] = lambda came: (named_context(came[0]), None)
        else:
            home = self._returning(plan, "q", (out[0], _lse_to_send(lse)[0].T))
            read = lambda came: _output_and_lse(named_context(came[0]))
        return Exchange([home._replace(fingerprint=fingerprint)], read)

    def send_cotangents(self, arrays: Any, cotangents: Outputs) -> Exchange:
        own = tuple(x for x in cotangents if x is not None)
        attended = lambda x: Outputs(*(y[None] for y in x))
        if not self.moves_queries:
            return Exchange(None, lambda _: attended(own))
        moved = [self._outgoing(arrays[0], "q", own)]
        return Exchange(moved, lambda came: attended(came[0]))

    def give_back_gradients(self, arrays: Any, dq: Array, dkv: Any) -> Exchange:
        # A query is computed on one rank, so dq is rounded before it moves; dk and dv are sums.
        dtype = None if self.options.expansion else dq.dtype
        rows = [None if x is None else x[0] for x in dkv]
        returned = self._returning(arrays[0], "kv", rows, dtype)
        if not self.moves_queries:
            return Exchange([returned], lambda came: (dq[0], came[0]))
        return Exchange([self._returning(arrays[0], "q", dq[0]), returned], tuple)

    def _outgoing(self, plan, name: str, arrays) -> Argument:
        metadata, capacity = getattr(plan, f"{name}_metadata"), getattr(plan, f"{name}_capacity")
        return outgoing(
            arrays, metadata, capacity=capacity, capacity_name=f"PlanConfig.{name}_capacity"
        )

    def _returning(self, plan, name: str, arrays, dtype=None) -> Argument:
        return returning(
            arrays,
            getattr(plan, f"{name}_metadata"),
            num_tokens=plan.num_tokens,
            dtype=dtype,
            capacity_name=f"PlanConfig.{name}_capacity",
        )


def _attended(rows: Any) -> Any:
    """Returns queries, and keys and values, as the rows of one batch row."""
    q, kv = jax.tree.map(lambda x: x[None], tuple(rows))
    return q, tuple(kv)


# Rows that do not come back are 0 there. A row without keys travels as 0 likewise, and an lse of 0
# as the smallest normal number, which no sum of exponentials can tell from it.


def _lse_to_send(lse):
    tiny = jnp.finfo(lse.dtype).tiny
    return jnp.where(lse == -jnp.inf, 0, jnp.where(lse == 0, tiny, lse))


def _output_and_lse(home):
    out, lse = home
    return out, jnp.where(lse == 0, -jnp.inf, lse)


def check_plan_rows(op: str, operands: Operands, plan: Plan, packed: PackedMask) -> None:
    """Requires that a rank's rows match its plan."""
    q = operands.q
    is_placed = plan.is_placed
    advice = "Place the tokens" if is_placed else "Plan with the segment ids"
    if packed.positions is not None and packed.segment_ids is None:
        raise ValueError(
            f"{op}: got a plan and positions without segment_ids, which mark the padding, "
            "whose positions are ignored. Pass both, or segment_ids alone."
        )
    num_tokens = q.shape[0] * q.shape[1]
    if num_tokens != plan.num_tokens:
        raise ValueError(
            f"{op}: a rank holds {q.shape[0]} x {q.shape[1]} = {num_tokens} rows but "
            f"the plan is for {plan.num_tokens}. {advice} of this batch."
        )
    if q.shape[0] != plan.batch:  # as many rows, of other columns
        raise ValueError(
            f"{op}: a rank holds {q.shape[0]} x {q.shape[1]} rows but the plan is for "
            f"{plan.batch} x {plan.num_tokens // plan.batch}. {advice} of this batch."
        )


def sizes_for_plan(workload: Workload, hardware: Hardware) -> tuple[dict[str, Any], int | None]:
    """Returns the sizes of a plan for a workload, and the ranks of each of several nodes."""
    n, size = workload.num_ranks, hardware.node_size(workload.num_ranks)
    sizes = {"world_size": n, "columns": n * workload.tokens_per_rank}
    return sizes, size if size < n else None


def moves_of_plan(plan: Plan | None, hardware: Hardware) -> Moves | None:
    """Returns the rows that a plan moves, by the links of the hardware."""
    if plan is None:
        return None

    def rows(name: str) -> Any:
        metadata, capacity = getattr(plan, f"{name}_metadata"), getattr(plan, f"{name}_capacity")
        sent, size = metadata.rows_between_ranks(), hardware.node_size(metadata.world_size)
        return rows_by_link(sent, ranks_per_node=size, capacity=capacity)

    return Moves(0 if plan.is_placed else rows("q"), rows("kv"))


# ---- The attention that one rank computes, without exchanges: a program that runs on one device.
#
# The programs call the functions of attention itself, with the key ranges of a rank. The rows
# that a
# rank would receive may have any values: only their number and the ranges determine the time.

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
    check_heads(options.op, *qkv)

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
