"""`Balanced`, `Placed` and `Halo`: rows move once, as a plan or the mask says."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int64

from jax_cp_dispatch._arrays import take_in_bounds
from jax_cp_dispatch._dispatch.arguments import Argument, outgoing, returning
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch._residuals import checkpoint_name_kv, named_context
from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, RankProgram, Shape
from jax_cp_dispatch.attention.algorithms.exchange_once import (
    Gathered,
    Movement,
    PendingExchange,
    gather_attend,
    row_passes,
)
from jax_cp_dispatch.attention.key_chunks import rows_before
from jax_cp_dispatch.attention.local.local_attention import attend_ranges, range_gradients
from jax_cp_dispatch.attention.local.picked import DocumentRows
from jax_cp_dispatch.attention.local.ranges import RowRanges, SoftmaxGradients, check_heads
from jax_cp_dispatch.attention.operands import Call, Operands, Outputs
from jax_cp_dispatch.attention.rotating import ranges_of_rows
from jax_cp_dispatch.cost import Hardware, Moves, StepCost, Workload, rows_by_link
from jax_cp_dispatch.cost.attention import Pass, Receivers, attention_seconds, steps_around
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
from jax_cp_dispatch.documents.layouts import SequenceLayout, contiguous_layout, zigzag_layout
from jax_cp_dispatch.documents.segment_ids import gather_sequence
from jax_cp_dispatch.masks import Full, Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.mask import PACKED, PLACED
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planning import Placement, Plan, PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.planning.inside_jit import plan_inside
from jax_cp_dispatch.planning.on_host import plan_read
from jax_cp_dispatch.planning.plan import plan_of_group
from jax_cp_dispatch.planning.request import PlannedPieces, list_transfers, make_metadata
from jax_cp_dispatch.planning.runs import key_ranges, local_runs


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
      config: block size and capacities of plans made in the call; a plan that you pass has its own.
        A plan of traced documents without capacities has room for any documents. Each rank then
        reserves, and keeps for the backward pass: q, out and lse of 2 T tokens and a block, for T
        tokens of the rank; and k and v of all W T tokens. A mask with a reach, such as a window,
        needs k and v of at most T (block + reach) / block tokens, the reach rounded up to blocks:
        5 T for a window of 512 and blocks of 128 that divide T.
    """

    name: ClassVar[str] = "balanced"
    follows_plan: ClassVar[bool] = True
    gathers_keys: ClassVar[bool] = True
    config: PlanConfig = PlanConfig()

    def check(self, op: str) -> None:
        check_plan_config(op, self.config)

    def why_not(self, call: Call, mask: Any) -> str | None:
        if call.order == PACKED:
            return None
        needs_all_keys = call.pick_block or call.local  # which zigzag never has
        other = "halo" if needs_all_keys and call.order != PLACED else call.order.name
        return (
            f"algorithm='balanced' needs tokens in packed order; got {call.order}. Pass "
            f"algorithm={other!r}, or the tokens and their documents as packed."
        )

    def plan_before(self, documents: Documents, num_ranks: int) -> Plan:
        return plan_read(documents, num_ranks, self.config)

    def run(self, call: Call, operands: Operands, documents: Documents) -> Outputs:
        if documents.plan is None:  # the same on every rank, from the documents of all
            shape = jax.tree.leaves(operands.q)[0].shape[:2]
            whole = jax.tree.map(jnp.asarray, with_segment_ids(documents, shape))
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
        return plan_attention(**arguments_for_plan(workload, hardware, self.config))

    def _steps(self, of: Pass) -> list[StepCost]:
        """Queries, keys and values are sent, ranks attend, and the output returns.

        Without `moves`, their number is estimated.
        """
        moves = estimated_moves(of.workload) if of.moves is None else of.moves
        return planned_steps(of._replace(moves=moves))


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
    gathers_keys: ClassVar[bool] = True
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
        """Places the tokens of a workload, for training steps of least time on the hardware."""
        config = PlanConfig(hardware=hardware, backward=True)
        return place_tokens(**arguments_for_plan(workload, hardware, config))

    def plan_for(self, workload: Workload, hardware: Hardware) -> Plan:
        return self.placement_for(workload, hardware).plan

    def _steps(self, of: Pass) -> list[StepCost]:
        """Keys arrive before attention; their gradients return after it."""
        if of.moves is None:
            raise ValueError(
                "step_costs: 'placed' needs moves, the rows of keys that each rank sends. Pass "
                "moves=Moves(0, rows): num_kv_tokens_moved of the plan of place_tokens, divided by "
                "the ranks."
            )
        return planned_steps(of)


# ---- Attention by a plan: keys move to the queries, and queries to other ranks or not at all.

# Blocks of 256 rows, as in a ring, compute up to 40 % more pairs, each in less time: 0.99 to 1.02
# of the time, in the mean of 11 batches on 2 cores, with and without the backward pass.
BLOCK_ROWS = 128


def attend_by_plan(call: Call, operands: Operands, documents: Documents) -> Outputs:
    """Computes this rank's part of attention by the plan of the documents.

    Ranks compare the checksums of their plans, and of ids, positions and mask, if these are given.
    """
    plan, packed = plan_of_group(call.op, documents.plan), replaced(documents, plans=())
    B, T = jax.tree.leaves(operands.q)[0].shape[:2]
    advice = "Place the tokens" if plan.is_placed else "Plan with the segment ids"
    if packed.positions is not None and packed.segment_ids is None:
        raise ValueError(
            f"{call.op}: got a plan and positions without segment_ids, which mark the padding, "
            "whose positions are ignored. Pass both, or segment_ids alone."
        )
    if plan.num_tokens != B * T:
        raise ValueError(
            f"{call.op}: a rank holds {B} x {T} = {B * T} rows but the plan is for "
            f"{plan.num_tokens}. {advice} of this batch."
        )
    if plan.batch != B:  # as many rows, of other columns
        raise ValueError(
            f"{call.op}: a rank holds {B} x {T} rows but the plan is for {plan.batch} x "
            f"{plan.num_tokens // plan.batch}. {advice} of this batch."
        )
    return _attend_planned(call, operands, plan, packed)


@partial(jax.jit, static_argnums=0)  # equal calls of a program are traced and lowered once
def _attend_planned(call: Call, operands: Operands, plan: Plan, packed: Documents) -> Outputs:
    rank, compared = lax.axis_index(call.exchange.axis_name), (packed.segment_ids, packed.positions)
    if call.pick_block or call.local:
        options: Any = {"size": plan.q_capacity, "mask": plan.mask}
        rows = named_context(key_ranges(local_runs(plan, rank), **options))
        rows = DocumentRows(*(x[None] for x in rows))
        ranges = MaskRanges(*rows[:2])
    else:
        ranges, rows = MaskRanges(*(x[None] for x in named_context(plan.local_ranges(rank)))), None
    gathered = Gathered(
        ranges,
        fingerprint=rank_fingerprint(plan.fingerprint, rank, *compared, packed.mask),
        q_metadata=None if plan.is_placed else plan.q_metadata,
        kv_metadata=plan.kv_metadata,
        rows=rows,
    )
    movement = PlannedMovement(call, plan.num_tokens, plan.q_capacity, plan.kv_capacity)
    return _attend_rows_of_batch(movement, operands.varying(call.exchange), gathered)


def _attend_rows_of_batch(
    movement: PlannedMovement, operands: Operands, gathered: Gathered
) -> Outputs:
    q, k, v, sink, weights, picks = operands
    shape = jax.tree.leaves(q)[0].shape[:2]
    q, k, v, picks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, picks))
    compute = movement.call.local or gather_attend
    outputs: Any = compute(movement, Operands(q, k, v, sink, weights, picks), gathered)
    out, lse, max_logits = outputs
    by_batch = lambda x: x.reshape(*shape, *x.shape[1:])
    if max_logits is not None:
        max_logits = lax.pmax(lax.stop_gradient(max_logits), movement.call.exchange.axis_name)
    return Outputs(by_batch(out), None if lse is None else by_batch(lse), max_logits)


@dataclasses.dataclass(frozen=True)
class PlannedMovement(Movement):
    """Rows `[T, heads, H]` move as planned; without `q_metadata`, queries stay, and their output.

    Errors of the exchanges refer to the config of the plan.
    """

    call: Call
    num_tokens: int  # rows of a rank
    # Rows of a rank's receive buffers
    q_capacity: int
    kv_capacity: int
    block_rows = BLOCK_ROWS
    in_parts = sums_dkv = True

    def send(self, gathered: Gathered, part: Operands) -> PendingExchange:
        q_stays, fingerprint = gathered.q_metadata is None, gathered.fingerprint
        moved = [self._outgoing(gathered, "kv", part.moved, fingerprint if q_stays else None)]
        of_queries = part.q if part.picks is None else (part.q, part.picks)
        if not q_stays:
            moved = [self._outgoing(gathered, "q", of_queries, fingerprint), *moved]

        def read(came):
            *q, kv = checkpoint_name_kv(came)
            of_one_row = partial(jnp.expand_dims, axis=0)
            return jax.tree.map(of_one_row, (of_queries if q_stays else q[0], kv))

        return PendingExchange(moved, read)

    def give_back(self, gathered: Gathered, out: Array, lse: Array) -> PendingExchange:
        return_lse, lses = self.call.return_lse, []
        if gathered.q_metadata is None:
            return PendingExchange(None, lambda _: (out[0], lse[0].T if return_lse else None))
        if return_lse:
            # Rows that do not come back are 0 there. A row without keys travels as 0 likewise, and
            # an lse of 0 as the smallest normal number: no sum of exponentials differs by it.
            sent = jnp.where(lse == 0, jnp.finfo(lse.dtype).tiny, lse)
            lses = [jnp.where(lse == -jnp.inf, 0, sent)[0].T]

        def read(came):
            out, *lses = named_context(came[0])
            return out, jnp.where(lses[0] == 0, -jnp.inf, lses[0]) if lses else None

        # The output is NaN for a wrong fingerprint, where there are no errors.
        moved = self._returning(gathered, "q", [out[0], *lses], fingerprint=gathered.fingerprint)
        return PendingExchange([moved], read)

    def send_cotangents(self, gathered: Gathered, cotangents: Outputs) -> PendingExchange:
        own = tuple(x for x in cotangents if x is not None)
        moved = None if gathered.q_metadata is None else [self._outgoing(gathered, "q", own)]
        return PendingExchange(
            moved, lambda came: Outputs(*(x[None] for x in (came[0] if came else own)))
        )

    def give_back_gradients(self, gathered: Gathered, dq: Any, dkv: Any) -> PendingExchange:
        # A query is computed on one rank, so dq is rounded before it moves; dk and dv are sums.
        dtype = None if self.call.expansion or self.call.local else dq.dtype
        dq, rows = jax.tree.map(lambda x: x[0], (dq, list(dkv)))
        returned = self._returning(gathered, "kv", rows, dtype=dtype)
        if gathered.q_metadata is None:
            return PendingExchange([returned], lambda came: (dq, came[0]))
        return PendingExchange([self._returning(gathered, "q", dq), returned], tuple)

    def _outgoing(self, gathered: Gathered, name: str, arrays, fingerprint=None) -> Argument:
        metadata, capacity = getattr(gathered, f"{name}_metadata"), f"{name}_capacity"
        options: Any = {"capacity_name": f"PlanConfig.{capacity}", "fingerprint": fingerprint}
        return outgoing(arrays, metadata, capacity=getattr(self, capacity), **options)

    def _returning(self, gathered: Gathered, name: str, arrays, **options: Any) -> Argument:
        options |= {"num_tokens": self.num_tokens, "capacity_name": f"PlanConfig.{name}_capacity"}
        return returning(arrays, getattr(gathered, f"{name}_metadata"), **options)


def arguments_for_plan(workload: Workload, hardware: Hardware, config: PlanConfig) -> Any:
    """Returns what plans a workload, for its heads and the nodes of the hardware."""
    n, size = workload.num_ranks, hardware.node_size(workload.num_ranks)
    heads: Any = {"num_heads": workload.num_heads, "num_kv_heads": workload.num_kv_heads}
    config = dataclasses.replace(config, **heads)
    config = dataclasses.replace(config, ranks_per_node=size if size < n else None)
    documents = {"lengths": workload.rows, "columns": n * workload.tokens_per_rank}
    return documents | {"world_size": n, "mask": workload.mask, "config": config}


def moves_of_plan(plan: Plan | None, hardware: Hardware) -> Moves | None:
    """Returns the rows that a plan moves, by the links of the hardware."""
    if plan is None:
        return None

    def rows(name: str) -> Any:
        metadata, capacity = getattr(plan, f"{name}_metadata"), getattr(plan, f"{name}_capacity")
        sent, size = metadata.rows_between_ranks(), hardware.node_size(metadata.world_size)
        return rows_by_link(sent, ranks_per_node=size, capacity=capacity)

    return Moves(0 if plan.is_placed else rows("q"), rows("kv"), np.asarray(plan.pairs, float))


def planned_program(call: Call, plan: Plan, qkv: list[Shape], *, backward: bool) -> RankProgram:
    check_heads(call.op, *qkv)

    def run(rank, q, k, v, ranges):
        passes, ranges = row_passes(call, BLOCK_ROWS, q, k), RowRanges.of_mask(ranges, q.shape[:2])
        out, lse = attend_ranges(passes, q, (k, v), ranges, None)
        if not backward:
            return out, lse
        whole = SoftmaxGradients(out, lse, out)
        return out, *range_gradients(passes, q, (k, v), ranges, whole)

    ranges = [
        MaskRanges(*(x[None] for x in plan.local_ranges(rank))) for rank in range(plan.world_size)
    ]
    rows = ranges[0].k_start.shape[1], plan.kv_capacity, plan.kv_capacity
    shapes = [Shape((1, n, *x.shape[2:]), x.dtype) for n, x in zip(rows, qkv, strict=True)]
    return RankProgram(run, shapes, ranges, np.asarray(plan.pairs).astype(np.int64))


# ---- `Halo`: each rank receives the keys that its queries still see beyond its own tokens, once.


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
    gathers_keys: ClassVar[bool] = True
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
        num_tokens = jax.tree.leaves(operands.q)[0].shape[1]
        layout = _layout(call.order.layout, call.num_ranks, num_tokens)
        return _attend_halo(call, held_rows(layout, documents.mask), operands, documents)

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        mask, num_tokens = workload.visible, workload.num_ranks * workload.tokens_per_rank
        is_short = all(x is not None and x < num_tokens for x in mask.reach)
        return (cls(layout),) if is_short else ()

    def describe(self, workload: Workload) -> str:
        return f"Halo\n{self._held(workload).metadata(len(workload.rows)).describe()}"

    def _steps(self, of: Pass) -> list[StepCost]:
        """Keys arrive before attention of the rank's own queries; gradients return after it."""
        workload, hardware, backward, _ = of
        batch, held = len(workload.rows), self._held(workload)
        size, capacity = hardware.node_size(workload.num_ranks), batch * held.capacity
        sent, own = batch * held.metadata(1).rows_between_ranks(), workload.rows_per_rank
        rows = {"q_rows": own, "kv_rows": capacity}
        compute = attention_seconds(of, self._pairs(of), **rows, is_planned=True)
        row = workload.kv_bytes(1, itemsize=4 if backward else None)
        num_bytes = rows_by_link(sent, ranks_per_node=size, capacity=capacity).times(row)
        keys, none = (num_bytes, row * own), (num_bytes.times(0), 0.0)
        before, after = (none, keys) if backward else (keys, none)
        steps = steps_around(of, compute, before, after, _receivers(sent, size))
        return steps[1:] if backward else steps[:-1]

    def _pairs(self, of: Pass) -> float:
        pairs = pairs_between_ranks(of.workload, zigzag=self.layout == "zigzag").sum(1)
        return decisive_pairs(pairs, of.hardware)

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
    """

    layout: SequenceLayout  # of the tokens on the ranks
    # The most keys before and after its own that a query sees
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

    def metadata(self, batch: int) -> Metadata:
        """Returns the plan of the exchange of keys, of all batch rows one after another."""

        def pieces(ranges):
            found = []
            for number in range(batch):
                for rank, of_rank in enumerate(ranges):
                    row = number * sum(end - start for start, end in of_rank)
                    for start, end in of_rank:
                        found += [(rank, number, start, end, row)] if start < end else []
                        row += end - start
            return PlannedPieces(*np.array(found, np.int64).reshape(-1, 5).T)

        num_ranks, blocks = self.layout.num_ranks, self.layout.blocks
        own = [[(start, start + length) for start, length in of_rank] for of_rank in blocks]
        moves = list_transfers(pieces(own), pieces(self.parts()))
        return make_metadata(moves, num_ranks=num_ranks)

    def rows_before(self, rank: Any, token: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Returns the held rows of a rank before the first one of each token or of a later one."""
        table = np.zeros((self.layout.num_ranks, 2, self.layout.num_blocks), np.int32)
        for i, of_rank in enumerate(self.parts()):
            for j, (low, high) in enumerate(of_rank):
                table[i, :, j] = low, high - low
        return rows_before(token, *take_in_bounds(table, rank))


@functools.lru_cache(maxsize=64)
def held_rows(layout: SequenceLayout, mask: Mask) -> HeldRows:
    """Returns the keys that the ranks hold, as far as a mask reaches."""
    most = layout.num_tokens
    return HeldRows(layout, *(most if x is None else min(x, most) for x in mask.reach))


@partial(jax.jit, static_argnums=(0, 1))  # equal calls are traced and lowered once
def _attend_halo(call: Call, held: HeldRows, operands: Operands, packed: Documents) -> Outputs:
    exchange, (B, T) = call.exchange, jax.tree.leaves(operands.q)[0].shape[:2]
    rank = lax.axis_index(exchange.axis_name)
    order: Any = {"layout": call.order.layout, "checks_order": call.checks_order}
    token, rows, starts = held.layout.positions(rank)[:T], None, None
    if call.pick_block or call.local:  # documents, and what the mask shows of them
        documents = replaced(packed, mask=Full())
        whole, fault = gathered_ranges(exchange, documents, (B, T), **order)
        whole = ranges_of_rows(documents.mask, whole, token).bounds
        columns = jnp.broadcast_to(token, (B, T)), whole[..., 0], whole[..., 1]
        seen = packed.mask.clipped(T * call.num_ranks).ranges(*columns)
        is_token = whole[..., 0] < whole[..., 1]
        seen = jnp.where(is_token[..., None], jnp.stack(seen[:2], 2), 0)
        starts = columns[:2]
    else:
        seen, fault = gathered_ranges(exchange, packed, (B, T), **order)
        seen = ranges_of_rows(packed.mask, seen, token).bounds
    num_held = take_in_bounds(held.num_rows.astype(np.int32), rank)
    bounds = held.rows_before(rank, seen)
    bounds += np.arange(B, dtype=np.int32)[:, None, None] * num_held  # one batch row after another
    ranges = MaskRanges(*(bounds[..., i].reshape(1, -1) for i in range(2)))
    if starts is not None:
        column, first = (x.reshape(1, -1) for x in starts)
        origin = ranges.k_start - (seen[..., 0].reshape(1, -1) - first)
        rows = DocumentRows(*ranges[:2], origin, column - first)
    fingerprint = None if fault is None else order_fingerprint(fault, rank)
    metadata = jax.tree.map(jnp.asarray, held.metadata(B))
    gathered = Gathered(ranges, None, fingerprint, None, metadata, rows)
    gathered = named_context(vary_alike(gathered, also=exchange.axis_names))
    movement = PlannedMovement(call, B * T, 0, B * held.capacity)
    return _attend_rows_of_batch(movement, *vary_alike((operands.varying(exchange), gathered)))
