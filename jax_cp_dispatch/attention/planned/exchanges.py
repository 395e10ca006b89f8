"""The exchanges of an attention plan; their errors speak of the plan and of `PlanConfig`."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, DTypeLike, Float, Int32

from jax_cp_dispatch._dispatch.exchange import move, outgoing, returning
from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan


class PlannedExchanges(NamedTuple):
    """Options of all exchanges of one attention; static."""

    op: str
    axis_name: AxisName
    implementation: str | None
    deadline: float | None

    def send_qkv(
        self, plan: AttentionPlan, q, kv, stamp: Int32[Array, " 5"]
    ) -> tuple[Float[Array, "q_capacity N H"], tuple[Float[Array, "kv_capacity K _"], ...]]:
        """Queries, and keys with values, go where they are computed; if the stamps are right."""
        queries = self._outgoing("q", q, plan.q_metadata, plan.q_capacity)
        keys = self._outgoing("kv", kv, plan.kv_metadata, plan.kv_capacity)
        q, kv = self._move(queries._replace(stamp=stamp), keys)
        return q, kv

    def send_kv(self, plan: PlacedPlan, kv) -> tuple[Float[Array, "kv_capacity K _"], ...]:
        """Keys with values, where queries stay at home."""
        return self._move(self._outgoing("kv", kv, plan.kv_metadata, plan.kv_capacity))[0]

    def return_kv(self, plan: PlacedPlan, dkv, dtype: DTypeLike):
        """Their gradients."""
        return self._move(self._returning("kv", dkv, plan.kv_metadata, plan, dtype))[0]

    def return_q(
        self, plan: AttentionPlan, out, stamp: Int32[Array, " 5"]
    ) -> Float[Array, "T N H"]:
        """The output comes home; the stamp makes all of it NaN where nothing can be refused."""
        out = self._returning("q", out, plan.q_metadata, plan)
        return self._move(out._replace(stamp=stamp))[0]

    def send_q(self, plan: AttentionPlan, dout) -> Float[Array, "q_capacity N Hv"]:
        """The output's gradients follow the queries."""
        return self._move(self._outgoing("q", dout, plan.q_metadata, plan.q_capacity))[0]

    def return_qkv(self, plan: AttentionPlan, dq, dkv, dtype: DTypeLike):
        """The gradients come home, rounded to `dtype` when they have been summed."""
        queries = self._returning("q", dq, plan.q_metadata, plan, dtype)
        keys = self._returning("kv", dkv, plan.kv_metadata, plan, dtype)
        return self._move(queries, keys)

    def _outgoing(self, name, arrays, metadata, capacity):
        piece = outgoing(self.op, name, f"{name}_", arrays, metadata, capacity, None, None)
        return piece._replace(capacity_name=f"PlanConfig.{name}_capacity")

    def _returning(self, name, arrays, metadata, plan, dtype=None):
        piece = returning(self.op, name, f"{name}_", arrays, metadata, plan.num_tokens, None, dtype)
        return piece._replace(capacity_name=f"PlanConfig.{name}_capacity")

    def _move(self, *pieces):
        return move(self.op, pieces, self.axis_name, None, self.implementation, self.deadline)
