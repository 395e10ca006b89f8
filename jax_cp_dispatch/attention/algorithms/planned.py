"""`Balanced`, `Placed` and `Halo`: rows move once, as a plan or the mask says."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int64

from jax_cp_dispatch._arrays import take_in_bounds
from jax_cp_dispatch._dispatch import Argument, outgoing, returning
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch._residuals import checkpoint_name_kv, named_context
from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, RankProgram, Shape
from jax_cp_dispatch.attention.algorithms.exchange_once import (
    Exchange,
    Movement,
    attend_rows,
    gather_attend,
    parts_of_heads,
    row_gradients,
)
from jax_cp_dispatch.attention.local.ranges import SoftmaxGradients, check_heads
from jax_cp_dispatch.attention.operands import Call, Operands, Outputs
from jax_cp_dispatch.attention.rotating import ranges_of_rows
from jax_cp_dispatch.cost import Hardware, Moves, StepCost, Workload, rows_by_link
from jax_cp_dispatch.cost.attention import Receivers, attention_seconds, step_cost
from jax_cp_dispatch.cost.pairs import (
    decisive_pairs,
    estimated_moves,
    pairs_between_ranks,
    planned_steps,
)
from jax_cp_dispatch.documents.documents import (
    Documents,
    gathered_ranges,
    replaced,
    trusted,
    with_segment_ids,
)
from jax_cp_dispatch.documents.fingerprint import order_fingerprint, rank_fingerprint
from jax_cp_dispatch.documents.layouts import (
    SequenceLayout,
    contiguous_layout,
    zigzag_layout,
)
from jax_cp_dispatch.documents.segment_ids import gather_sequence
from jax_cp_dispatch.masks import Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.mask import PACKED, PLACED
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning import Placement, Plan, PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.planning.inside_jit import plan_inside
from jax_cp_dispatch.planning.on_host import plan_read
from jax_cp_dispatch.planning.plan import plan_of_group


@dataclasses.dataclass(frozen=True)
class Balanced(Algorithm):
    """Every rank computes an equal share of the query-key pairs.

    Sends each block of queries to the rank that a plan selects and each key block to the ranks that
    need it, computes attention there, and returns the output. Use it for packed documents, whose
    work is unequal in any fixed layout. Supports contiguous tokens only.

    Gradients move by the transposes of the same exchanges; dK and dV are summed over the ranks in
    float32 and rounded once. Residuals per rank: the received q, k and v, the output computed
    there, and its lse.

    Attributes:
      config: block size and capacities of plans made in the call. A plan that you pass has its own.
        Made from traced documents, a plan without capacities has room for any: each rank reserves,
        and keeps for the backward pass, q, out and lse of two times its tokens and a block, and k
        and v of `kv_capacity` tokens. That is all keys, W times the rank's tokens T; for a mask
        with a reach, such as windows and chunks, at most T (block + reach) / block, the reach
        rounded up to blocks: 5 T for a window of 512 and blocks of 128 that divide T.
    """

    name: ClassVar[str] = "balanced"
    follows_plan: ClassVar[bool] = True
    config: PlanConfig = PlanConfig()

    def check(self, op: str) -> None:
        check_plan_config(op, self.config)

    def why_not(self, call: Call, mask: Any) -> str | None:
        if call.order == PACKED:
            return None
        return (
            f"algorithm='balanced' needs tokens in packed order; got {call.order}. Pass "
            f"algorithm={call.order.name!r}, or the tokens and their documents as packed."
        )

    def plan_before(self, documents: Documents, num_ranks: int) -> Plan:
        return plan_read(documents, num_ranks, self.config)

    def run(self, call: Call, operands: Operands, documents: Documents) -> Outputs:
        if documents.plan is None:  # the same on every rank, from the documents of all
            whole = jax.tree.map(jnp.asarray, with_segment_ids(documents, operands.q.shape[:2]))
            whole = gather_sequence(call.exchange, whole, call.num_ranks)
            rank = lax.axis_index(call.exchange.axis_name)
            plan = plan_inside(
                *(whole.segment_ids, whole.positions),
                num_ranks=call.num_ranks,
                mask=whole.mask,
                config=self.config,
                rank=rank,
            )
            plan = named_context(plan)
            documents = trusted(mask=plan.mask, plans=(plan,))  # nothing to compare
        return attend_by_plan(call, operands, documents)

    def rank_program(
        self, call: Call, documents: Documents, qkv: list[Shape], *, backward: bool
    ) -> RankProgram:
        plan = documents.plan or self.plan_before(documents, call.num_ranks)
        return planned_program(call, plan, qkv, backward=backward)

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        return (cls(),) if layout == "contiguous" else ()

    def plan_for(self, workload: Workload, hardware: Hardware) -> Plan:
        sizes, ranks_per_node = sizes_for_plan(workload, hardware)
        heads: Any = {"num_heads": workload.num_heads, "num_kv_heads": workload.num_kv_heads}
        config = dataclasses.replace(self.config, **heads, ranks_per_node=ranks_per_node)
        return plan_attention(lengths=workload.rows, mask=workload.mask, config=config, **sizes)

    def _steps(
        self, workload: Workload, hardware: Hardware, moves: Moves | None, *, backward: bool
    ) -> list[StepCost]:
        """Queries, keys and values are sent, all ranks do equal work, and the output returns.

        Without `moves`, their number is estimated.
        """
        moves = estimated_moves(workload) if moves is None else moves
        return planned_steps(moves, workload, hardware, backward=backward)


def check_plan_config(op: str, config: Any) -> None:
    if not isinstance(config, PlanConfig):
        raise TypeError(
            f"{op}: config is {config!r}; it needs to be a PlanConfig. Omit it for the default."
        )


# ---- `Placed`: tokens are on the ranks that `place_tokens` selected; queries stay.


@dataclasses.dataclass(frozen=True)
class Placed(Algorithm):
    """Only keys and values move, to the ranks that attend them, as a placement requires.

    Use it if the data pipeline can place tokens and many layers share a placement. Needs the plan
    of `place_tokens`, and q, k, v in its order, which is also that of the output.

    The gradients of keys and values return by the transpose of the same exchange, are summed over
    the ranks in float32, and rounded once. Residuals per rank: q, the received k and v, the output,
    and its lse.
    """

    name: ClassVar[str] = "placed"
    advice: ClassVar[str] = (
        "Place the tokens of every batch with place_tokens, and pass its documents."
    )

    def why_not(self, call: Call, mask: Any) -> str | None:
        if call.order == PLACED:
            return None
        return (
            f"algorithm='placed' needs tokens in placed order; got {call.order}. Pass "
            "documents=place_tokens(...).documents, and q, k, v in that order: Placement.apply."
        )

    def run(self, call: Call, operands: Operands, documents: Documents) -> Outputs:
        return attend_by_plan(call, operands, documents)

    def rank_program(
        self, call: Call, documents: Documents, qkv: list[Shape], *, backward: bool
    ) -> RankProgram:
        plan = documents.plan
        if plan is None:
            ids, mask = documents.segment_ids, documents.mask
            plan = place_tokens(segment_ids=ids, world_size=call.num_ranks, mask=mask).plan
        return planned_program(call, plan, qkv, backward=backward)

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        return (cls(),) if can_place and layout == "contiguous" else ()

    def placement_for(self, workload: Workload, hardware: Hardware) -> Placement:
        """Places the tokens of a workload for the nodes of the hardware."""
        sizes, ranks_per_node = sizes_for_plan(workload, hardware)
        config = PlanConfig(ranks_per_node=ranks_per_node)
        return place_tokens(workload.rows, **sizes, mask=workload.mask, config=config)

    def plan_for(self, workload: Workload, hardware: Hardware) -> Plan:
        return self.placement_for(workload, hardware).plan

    def _steps(
        self, workload: Workload, hardware: Hardware, moves: Moves | None, *, backward: bool
    ) -> list[StepCost]:
        """Keys arrive before attention, of equal work; their gradients return after it."""
        if moves is None:
            raise ValueError(
                "step_costs: 'placed' needs moves, the rows of keys that each rank sends. Pass "
                "moves=Moves(0, rows): num_kv_tokens_moved of the plan of place_tokens, divided by "
                "the ranks."
            )
        steps = planned_steps(moves, workload, hardware, backward=backward)
        return steps[1:] if backward else steps[:-1]


# ---- Attention by a plan: keys move to the queries, and queries to other ranks or not at all.

# Blocks of 256 rows, as in a ring, compute up to 40 % more pairs, each in less time: 0.99 to 1.02
# of the time, in the mean of 11 batches on 2 cores, with and without the backward pass.
BLOCK_ROWS = 128


def attend_by_plan(call: Call, operands: Operands, documents: Documents) -> Outputs:
    """Computes this rank's part of attention by the plan of the documents.

    Ranks compare the checksums of their plans, and of ids, positions and mask, if these are given.
    """
    plan, packed = plan_of_group(call.op, documents.plan), replaced(documents, plans=())
    check_plan_rows(call.op, operands, plan, packed)
    return _attend_planned(PlannedMovement(call, not plan.is_placed), operands, plan, packed)


@partial(jax.jit, static_argnums=0)  # equal calls of a program are traced and lowered once
def _attend_planned(
    movement: PlannedMovement, operands: Operands, plan: Plan, packed: Documents
) -> Outputs:
    exchange = movement.call.exchange
    rank, compared = lax.axis_index(exchange.axis_name), (packed.segment_ids, packed.positions)
    fingerprint = rank_fingerprint(plan.fingerprint, rank, *compared, packed.mask)
    return _attend_rows_of_batch(movement, operands.varying(exchange), (plan, fingerprint))


def _attend_rows_of_batch(movement: PlannedMovement, operands: Operands, arrays: Any) -> Outputs:
    q, k, v, *others = operands
    shape = q.shape[:2]
    q, k, v = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v))
    outputs: Any = gather_attend(movement, Operands(q, k, v, *others), arrays)
    out, lse, max_logits = outputs
    by_batch = lambda x: x.reshape(*shape, *x.shape[1:])
    return Outputs(by_batch(out), None if lse is None else by_batch(lse), max_logits)


@dataclasses.dataclass(frozen=True)
class PlannedMovement(Movement):
    """Rows `[T, heads, H]` move as planned; `arrays` are the plan and what ranks compare.

    Errors of the exchanges refer to the config of the plan.

    Attributes:
      moves_queries: else they stay, and the output with them.
    """

    call: Call
    moves_queries: bool
    block_rows = BLOCK_ROWS

    def parts(self, operands: Operands) -> list[Operands]:
        return parts_of_heads(self.call, operands)

    def ranges(self, arrays: Any) -> MaskRanges:
        plan, _ = arrays
        rank = lax.axis_index(self.call.exchange.axis_name)
        return MaskRanges(*(x[None] for x in named_context(plan.local_ranges(rank))))

    def send(self, arrays: Any, part: Operands) -> Exchange:
        plan, fingerprint = arrays
        if not self.moves_queries:
            kv = self._outgoing(plan, "kv", part.moved, fingerprint)
            read = lambda came: _attended((part.q, checkpoint_name_kv(came[0])))
            return Exchange([kv], read)
        q = self._outgoing(plan, "q", part.q, fingerprint)
        kv = self._outgoing(plan, "kv", part.moved)
        return Exchange([q, kv], lambda came: _attended(checkpoint_name_kv(came)))

    def give_back(self, arrays: Any, out: Array, lse: Array) -> Exchange:
        if not self.moves_queries:
            return Exchange(None, lambda _: (out[0], lse[0].T if self.call.return_lse else None))
        returned: Any = out[0]
        if self.call.return_lse:
            # Rows that do not come back are 0 there. A row without keys travels as 0 likewise, and
            # an lse of 0 as the smallest normal number: no sum of exponentials differs by it.
            sent = jnp.where(lse == 0, jnp.finfo(lse.dtype).tiny, lse)
            returned = out[0], jnp.where(lse == -jnp.inf, 0, sent)[0].T

        def read(came):
            if not self.call.return_lse:
                return named_context(came[0]), None
            out, lse = named_context(came[0])
            return out, jnp.where(lse == 0, -jnp.inf, lse)

        # The output is NaN for a wrong fingerprint, where there are no errors.
        return Exchange([self._returning(arrays[0], "q", returned, fingerprint=arrays[1])], read)

    def send_cotangents(self, arrays: Any, cotangents: Outputs) -> Exchange:
        own = tuple(x for x in cotangents if x is not None)
        attended = lambda x: Outputs(*(y[None] for y in x))
        if not self.moves_queries:
            return Exchange(None, lambda _: attended(own))
        moved = [self._outgoing(arrays[0], "q", own)]
        return Exchange(moved, lambda came: attended(came[0]))

    def give_back_gradients(self, arrays: Any, dq: Array, dkv: Any) -> Exchange:
        # A query is computed on one rank, so dq is rounded before it moves; dk and dv are sums.
        dtype = None if self.call.expansion else dq.dtype
        rows = [None if x is None else x[0] for x in dkv]
        returned = self._returning(arrays[0], "kv", rows, dtype=dtype)
        if not self.moves_queries:
            return Exchange([returned], lambda came: (dq[0], came[0]))
        return Exchange([self._returning(arrays[0], "q", dq[0]), returned], tuple)

    def _outgoing(self, plan, name: str, arrays, fingerprint: Any = None) -> Argument:
        metadata, capacity = getattr(plan, f"{name}_metadata"), getattr(plan, f"{name}_capacity")
        options: Any = {"capacity_name": f"PlanConfig.{name}_capacity", "fingerprint": fingerprint}
        return outgoing(arrays, metadata, capacity=capacity, **options)

    def _returning(self, plan, name: str, arrays, **options: Any) -> Argument:
        options |= {"num_tokens": plan.num_tokens, "capacity_name": f"PlanConfig.{name}_capacity"}
        return returning(arrays, getattr(plan, f"{name}_metadata"), **options)


def _attended(rows: Any) -> Any:
    """Returns queries, and keys and values, as the rows of one batch row."""
    q, kv = jax.tree.map(lambda x: x[None], tuple(rows))
    return q, tuple(kv)


def check_plan_rows(op: str, operands: Operands, plan: Plan, packed: Documents) -> None:
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


def planned_program(call: Call, plan: Plan, qkv: list[Shape], *, backward: bool) -> RankProgram:
    check_heads(call.op, *qkv)

    def run(rank, q, k, v, ranges):
        out, lse, _ = attend_rows(call, BLOCK_ROWS, q, (k, v), ranges)
        if not backward:
            return out, lse
        whole = SoftmaxGradients(out, lse, out)
        return out, *row_gradients(call, BLOCK_ROWS, q, (k, v), ranges, whole)

    ranges = [
        MaskRanges(*(x[None] for x in plan.local_ranges(rank))) for rank in range(plan.world_size)
    ]
    rows = ranges[0].k_start.shape[1], plan.kv_capacity, plan.kv_capacity
    shapes = [Shape((1, n, *x.shape[2:]), x.dtype) for n, x in zip(rows, qkv, strict=True)]
    return RankProgram(run, shapes, ranges, np.asarray(plan.pairs).astype(np.int64))


# ---- `Halo`: each rank receives the keys that its queries still see beyond its own tokens, once.

# An array or `Metadata`, or anything that a transformation maps over the leaves.
Leaf: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Halo(Algorithm):
    """Each rank receives the keys that its queries still see, from the ranks before and after.

    Queries stay, and tokens keep their order. `Mask.reach` says how many tokens before and after
    itself a query sees. A rank receives the keys and values of that many tokens before and after
    its own, from all ranks that hold some, in one exchange, and attends in one call. In zigzag
    layout it holds two parts of the sequence, and receives the tokens around each. Shorter
    documents do not reduce what moves.

    Use it for windows and chunks that are shorter than the sequence. On a side where the mask has
    no limit, a rank receives all tokens: for causal attention, memory holds all keys. Masks whose
    reach depends on the batch are refused: those of arrays, and windows with first tokens.

    The gradients of keys and values return by the transpose of the same exchange, are summed over
    the ranks in float32, and rounded once. Residuals per rank: q, the held k and v, the output, its
    lse, and the ranges of its rows.

    Attributes:
      layout: the order of tokens that predictions assume: "contiguous" or "zigzag". Calls do not
        read it: they take the order of their documents.
    """

    name: ClassVar[str] = "halo"
    layout: str = dataclasses.field(default="contiguous", compare=False, repr=False)

    def why_not(self, call: Call, mask: Any) -> str | None:
        reason = super().why_not(call, mask)
        if reason is None and not isinstance(mask, StaticMask):
            return (
                f"algorithm='halo' needs a mask of numbers that say how far a query sees; with "
                f"{mask}, that depends on the documents. Pass algorithm='balanced', or "
                "'zigzag' in that order."
            )
        return reason

    def run(self, call: Call, operands: Operands, documents: Documents) -> Outputs:
        layout = _layout(call.order.layout, call.num_ranks, operands.q.shape[1])
        return _attend_halo(call, held_rows(layout, documents.mask), operands, documents)

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        mask, num_tokens = workload.visible, workload.num_ranks * workload.tokens_per_rank
        is_short = all(x is not None and x < num_tokens for x in mask.reach)
        return (cls(layout),) if is_short else ()

    def describe(self, workload: Workload) -> str:
        return f"Halo\n{self._held(workload).metadata(len(workload.rows)).describe()}"

    def _steps(
        self, workload: Workload, hardware: Hardware, moves: Moves | None, *, backward: bool
    ) -> list[StepCost]:
        """Keys arrive before attention of the rank's own queries; gradients return after it."""
        n, batch, held = workload.num_ranks, len(workload.rows), self._held(workload)
        size, capacity = hardware.node_size(n), batch * held.capacity
        sent = batch * held.rows_between_ranks()
        compute = attention_seconds(
            self._pairs(workload, hardware),
            *(workload, hardware),
            q_rows=workload.rows_per_rank,
            kv_rows=capacity,
            backward=backward,
            is_planned=True,
        )
        row = workload.kv_bytes(1, itemsize=4 if backward else None)
        num_bytes = rows_by_link(sent, ranks_per_node=size, capacity=capacity).times(row)
        own = row * workload.rows_per_rank
        exchange = step_cost(0.0, num_bytes, _receivers(sent, size), workload, hardware, own)
        steps = [exchange, StepCost(compute, 0.0, 0.0)]
        return steps[::-1] if backward else steps

    def _pairs(self, workload: Workload, hardware: Hardware) -> float:
        pairs = pairs_between_ranks(workload, zigzag=self.layout == "zigzag").sum(1)
        return decisive_pairs(pairs, hardware)

    def _held(self, workload: Workload) -> HeldRows:
        mask = workload.visible
        if not isinstance(mask, StaticMask):
            raise ValueError(
                f"step_costs: 'halo' needs a mask of numbers; got {type(mask).__name__}. Use "
                "another algorithm."
            )
        layout = _layout(self.layout, workload.num_ranks, workload.tokens_per_rank)
        return held_rows(layout, mask)


def _layout(name: str, num_ranks: int, num_tokens: int) -> SequenceLayout:
    make = zigzag_layout if name == "zigzag" else contiguous_layout
    return make(num_ranks, num_tokens)


def _receivers(sent: Int64[np.ndarray, "W W"], node_size: int) -> Receivers:
    """Returns to how many ranks the busiest one sends, by the kind of link."""
    rank = np.arange(len(sent))
    same = rank[:, None] // node_size == rank // node_size
    sends = (sent > 0) & (rank[:, None] != rank)
    inside, between = (sends & same).sum(1), (sends & ~same).sum(1)
    senders = (between > 0).reshape(-1, node_size).sum(1)
    return Receivers(*(max(1, int(x.max())) for x in (inside, between, senders)))


class HeldRows(NamedTuple):
    """The keys that each rank holds while it attends: its own and those around them; static.

    They are in the order of the sequence, without gaps between those that a query sees.

    Attributes:
      layout: of the tokens on the ranks.
      before, after: the most keys before and after its own that a query sees.
    """

    layout: SequenceLayout
    before: int
    after: int

    def parts(self) -> list[list[tuple[int, int]]]:
        """Returns the tokens that each rank holds: first, and one past the last, of each part."""
        end, parts = self.layout.num_tokens, []
        for blocks in self.layout.blocks:
            held: list[tuple[int, int]] = []
            for start, length in sorted(x for x in blocks if x[1]):
                low, high = max(0, start - self.before), min(end, start + length + self.after)
                if held and low <= held[-1][1]:
                    low, high = held[-1][0], max(high, held.pop()[1])
                held.append((low, high))
            parts.append(held)
        return parts

    @property
    def num_rows(self) -> Int64[np.ndarray, " W"]:
        return np.array([sum(b - a for a, b in of_rank) for of_rank in self.parts()], np.int64)

    @property
    def capacity(self) -> int:
        return int(self.num_rows.max())

    def pieces(self) -> Int64[np.ndarray, "pieces 5"]:
        """Returns what moves: receiver, first row there, sender, first row there, rows."""
        blocks = []
        for rank, of_rank in enumerate(self.layout.blocks):
            row = 0
            for start, length in of_rank:
                blocks += [(start, start + length, rank, row)] if length else []
                row += length
        blocks.sort()
        starts, pieces = [x[0] for x in blocks], []
        for receiver, parts in enumerate(self.parts()):
            held = 0
            for low, high in parts:
                first, last = bisect.bisect_right(starts, low) - 1, bisect.bisect_left(starts, high)
                for start, end, sender, row in blocks[first:last]:
                    a, b = max(low, start), min(high, end)
                    pieces.append((receiver, held + a - low, sender, row + a - start, b - a))
                held += high - low
        return np.array(pieces, np.int64).reshape(-1, 5)

    def rows_between_ranks(self) -> Int64[np.ndarray, "W W"]:
        """Returns the rows that each rank sends to each, and keeps, of one batch row."""
        receiver, _, sender, _, rows = self.pieces().T
        sent = np.zeros((self.layout.num_ranks,) * 2, np.int64)
        np.add.at(sent, (sender, receiver), rows)
        return sent

    def metadata(self, batch: int) -> Metadata:
        """Returns the plan of the exchange of keys, of all batch rows one after another."""
        num_ranks, rows = self.layout.num_ranks, self.layout.lengths.sum(1)
        receiver, to, sender, origin, length = self.pieces().T
        order = np.argsort(sender, kind="stable")
        count = np.bincount(sender, minlength=num_ranks)
        slot = np.arange(len(order)) - np.repeat(count.cumsum() - count, count)
        shape = num_ranks, batch, int(count.max())
        fields = [np.full(shape, empty, np.int64) for empty in (-1, 0, 0, 0)]
        b = np.arange(batch)[:, None]
        values = receiver, to + b * self.num_rows[receiver], length, origin + b * rows[sender]
        for field, value in zip(fields, values, strict=True):
            value = np.broadcast_to(value, (batch, len(order)))[:, order]
            field[sender[order], :, slot] = value.T
        dst_rank, dst_offset, seq_len, src_offset = (x.reshape(num_ranks, -1) for x in fields)
        received = batch * self.rows_between_ranks().T
        return Metadata(
            dst_rank=dst_rank.astype(np.int32),
            dst_offset=dst_offset.astype(np.uint32),
            seq_len=seq_len.astype(np.uint32),
            src_offset=src_offset.astype(np.uint32),
            num_recv_tokens=np.append(received, received.sum(1)[:, None], 1).astype(np.uint32),
            world_size=num_ranks,
        )

    def rows_before(self, rank: Any, token: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Returns the held rows of a rank before the first one of each token or of a later one."""
        table = np.zeros((self.layout.num_ranks, 2, self.layout.num_blocks), np.int32)
        for i, of_rank in enumerate(self.parts()):
            for j, (low, high) in enumerate(of_rank):
                table[i, :, j] = low, high - low
        start, length = take_in_bounds(table, rank)
        inside = jnp.clip(token[..., None] - start[None, None], 0, length[None, None])
        return jnp.sum(inside, axis=-1, dtype=jnp.int32)


@functools.lru_cache(maxsize=64)
def held_rows(layout: SequenceLayout, mask: Mask) -> HeldRows:
    """Returns the keys that the ranks hold, as far as a mask reaches."""
    most = layout.num_tokens
    return HeldRows(layout, *(most if x is None else min(x, most) for x in mask.reach))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KeysAround:
    """What `PlannedMovement` reads of a plan: the keys that move, and what each query sees."""

    kv_metadata: Leaf
    start: Leaf  # i32 [rows]
    end: Leaf
    num_tokens: int = dataclasses.field(metadata={"static": True})
    kv_capacity: int = dataclasses.field(metadata={"static": True})

    def local_ranges(self, rank: Any) -> tuple[Any, Any]:
        """Returns the first and last + 1 held row of each query of this rank."""
        return self.start, self.end


@partial(jax.jit, static_argnums=(0, 1))  # equal calls are traced and lowered once
def _attend_halo(call: Call, held: HeldRows, operands: Operands, packed: Documents) -> Outputs:
    exchange, (B, T) = call.exchange, operands.q.shape[:2]
    rank = lax.axis_index(exchange.axis_name)
    order: Any = {"layout": call.order.layout, "checks_order": call.checks_order}
    seen, fault = gathered_ranges(exchange, packed, (B, T), **order)
    seen = ranges_of_rows(packed.mask, seen, held.layout.positions(rank)[:T])
    num_held = take_in_bounds(held.num_rows.astype(np.int32), rank)
    first = np.arange(B, dtype=np.int32)[:, None] * num_held
    start, end = ((held.rows_before(rank, x) + first).reshape(-1) for x in (seen.start, seen.end))
    metadata = jax.tree.map(jnp.asarray, held.metadata(B))
    around = KeysAround(metadata, start, end, B * T, B * held.capacity)
    fingerprint = None if fault is None else order_fingerprint(fault, rank)
    arrays = named_context(vary_alike((around, fingerprint), also=exchange.axis_names))
    movement = PlannedMovement(call, moves_queries=False)
    return _attend_rows_of_batch(movement, *vary_alike((operands.varying(exchange), arrays)))
