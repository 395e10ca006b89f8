"""`Placed`: tokens are on the ranks that `place_tokens` selected; queries stay."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, Call
from jax_cp_dispatch.attention.algorithms.by_plan import attend_by_plan, sizes_for_plan
from jax_cp_dispatch.attention.algorithms.rank_program import Batch, RankProgram, planned_program
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.cost import Hardware, Moves, StepCost, Workload
from jax_cp_dispatch.cost.planned import planned_steps
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.planning import Placement, Plan, PlanConfig, place_tokens


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

    def why_not(self, call: Call) -> str | None:
        if call.plan is not None and call.plan.is_placed:
            return None
        return (
            f"algorithm='placed' needs tokens in placed order; got {call.options.order}. Pass "
            "documents=place_tokens(...).documents, and q, k, v in that order: Placement.apply."
        )

    def attend(
        self, options: AttentionOptions, operands: Operands, packed: PackedMask, plan: Any
    ) -> Outputs:
        return attend_by_plan(options, operands, plan, packed)

    def rank_program(
        self, options: AttentionOptions, batch: Batch, *, backward: bool
    ) -> RankProgram:
        plan = batch.plan
        if plan is None:
            mask, segment_ids, _ = batch.packed
            sizes = {"world_size": batch.num_ranks, "mask": mask}
            plan = place_tokens(segment_ids=segment_ids, **sizes).plan
        return planned_program(options, plan, batch.qkv, backward=backward)

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
