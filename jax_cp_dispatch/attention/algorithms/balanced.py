"""`Balanced`: queries and keys move to the ranks that a plan selects, for equal work."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, Call
from jax_cp_dispatch.attention.algorithms.by_plan import attend_by_plan, sizes_for_plan
from jax_cp_dispatch.attention.algorithms.rank_program import Batch, RankProgram, planned_program
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.cost import Hardware, Moves, StepCost, Workload
from jax_cp_dispatch.cost.planned import estimated_moves, planned_steps
from jax_cp_dispatch.documents.order import gather_sequence
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.planning import Plan, PlanConfig, plan_attention
from jax_cp_dispatch.planning.inside_jit import rank_plan


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

    def why_not(self, call: Call) -> str | None:
        if call.options.order.name == "zigzag" or (call.plan is not None and call.plan.is_placed):
            order = call.options.order
            return (
                f"algorithm='balanced' needs tokens in packed order; got {order}. Pass "
                f"algorithm={order.name!r}, or the tokens and their documents as packed."
            )
        return super().why_not(call)

    def plan_before(self, packed: PackedMask, num_ranks: int) -> Plan:
        mask, *documents = packed
        return plan_attention(*documents, world_size=num_ranks, mask=mask, config=self.config)

    def attend(
        self, options: AttentionOptions, operands: Operands, packed: PackedMask, plan: Any
    ) -> Outputs:
        if plan is None:
            plan = named_context(self._plan_inside(options, operands, packed))
            packed = PackedMask(plan.mask)  # nothing to compare
        return attend_by_plan(options, operands, plan, packed)

    def _plan_inside(
        self, options: AttentionOptions, operands: Operands, packed: PackedMask
    ) -> Plan:
        """Makes the same plan on every rank, from the documents of all."""
        packed = jax.tree.map(jnp.asarray, packed.with_segment_ids(operands.q.shape[:2]))
        axis_name = options.exchange.axis_name
        num_ranks, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
        packed = gather_sequence(options.exchange, packed, num_ranks)
        return rank_plan(packed, world_size=num_ranks, config=self.config, rank=rank)

    def rank_program(
        self, options: AttentionOptions, batch: Batch, *, backward: bool
    ) -> RankProgram:
        plan = batch.plan or self.plan_before(batch.packed, batch.num_ranks)
        return planned_program(options, plan, batch.qkv, backward=backward)

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
    """Requires the config of plans."""
    if not isinstance(config, PlanConfig):
        raise TypeError(
            f"{op}: config is {config!r}; it needs to be a PlanConfig. Omit it for the default."
        )
