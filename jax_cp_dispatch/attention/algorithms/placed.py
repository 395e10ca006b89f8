"""`Placed`: tokens are on the ranks that `place_tokens` selected; queries stay."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, Call
from jax_cp_dispatch.attention.algorithms.by_plan import attend_by_plan
from jax_cp_dispatch.attention.algorithms.rank_program import Batch, RankProgram, planned_program
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.planning import place_tokens


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
