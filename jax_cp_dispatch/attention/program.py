"""The program of `context_parallel_attention`: its options, and the part of each rank."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard

from jax_cp_dispatch._ranks.varying import can_check_varying
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.algorithms import Algorithm, Balanced, Placed, Rotating, Ulysses
from jax_cp_dispatch.attention.arguments import is_stack
from jax_cp_dispatch.attention.gather import gather_sequence
from jax_cp_dispatch.attention.mesh_axes import MeshAxes
from jax_cp_dispatch.attention.nested import shard_map_inside, varies_outside
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.packed_mask import PackedMask
from jax_cp_dispatch.attention.planned.balanced import attend_balanced
from jax_cp_dispatch.attention.planned.placed import attend_placed
from jax_cp_dispatch.attention.rotating.call import rotating_attention
from jax_cp_dispatch.attention.ulysses.attend import attend_ulysses
from jax_cp_dispatch.planner import AttentionPlan, PlanConfig, plan_attention


@dataclasses.dataclass(frozen=True)
class GlobalOptions:
    """The options of a call with global arrays; static.

    Attributes:
      axes: the mesh, and what its axes shard.
      algorithm: with its own options.
      attention: the options of all algorithms, for each rank.
    """

    axes: MeshAxes
    algorithm: Algorithm
    attention: AttentionOptions

    @property
    def num_ranks(self) -> int:
        return self.axes.num_ranks

    def plan(self, packed: PackedMask, config: PlanConfig) -> AttentionPlan:
        """Plans balanced attention of these documents, on all ranks."""
        mask, *documents = packed
        sizes = {"world_size": self.num_ranks, "mask": mask}
        return plan_attention(*documents, **sizes, config=config)


@partial(jax.jit, static_argnames="options")
def attend_global(q, k, v, plan, packed: PackedMask, *, options: GlobalOptions):
    """Computes attention from global arrays."""
    axes = options.axes
    sequence = P(axes.batch, axes.axis_name)
    rows = P(*sequence, axes.heads)
    of_plan = sequence if is_stack(plan) else P(axes.axis_name)
    in_specs = (rows, rows, rows, of_plan, sequence)
    k, v = (axes.repeat_kv_heads(x, q.shape[2]) for x in (k, v))
    operands: Any = (q, k, v, plan, packed)
    shard_map = partial(jax.shard_map, check_vma=can_check_varying())
    if varies_outside(operands, axes.manual):
        shard_map = shard_map_inside
    attend = shard_map(
        partial(_local, options),
        mesh=axes.mesh,
        in_specs=in_specs,
        out_specs=rows,
        axis_names=axes.manual,
    )
    if AxisType.Explicit in axes.mesh.axis_types:  # over explicit axes shard_map does not reshard
        shardings = [NamedSharding(axes.mesh, spec) for spec in in_specs]
        operands = (
            jax.tree.map(partial(reshard, out_shardings=sharding), operand)
            for operand, sharding in zip(operands, shardings, strict=True)
        )
    return attend(*operands)


def _local(options: GlobalOptions, q, k, v, plan, packed: PackedMask):
    """Computes one rank's part."""
    algorithm, attention = options.algorithm, options.attention
    if is_stack(plan):  # of which this group has one
        plan = jax.tree.map(lambda x: x[0], plan)
    if isinstance(algorithm, Placed):
        return attend_placed(attention, q, k, v, plan, packed)
    if isinstance(algorithm, Balanced):
        if plan is None:
            plan = named_context(_plan_on_ranks(options, algorithm, packed))
            packed = PackedMask(packed.mask)  # nothing to compare
        return attend_balanced(attention, q, k, v, plan, packed)
    if isinstance(algorithm, Ulysses):
        return attend_ulysses(attention, q, k, v, packed)
    rotating = cast(Rotating, algorithm)  # "auto" has been replaced
    return rotating_attention(attention, rotating, q, k, v, packed)


def _plan_on_ranks(options: GlobalOptions, algorithm: Balanced, packed) -> AttentionPlan:
    """Makes the same plan on every rank, from the documents of all."""
    exchange = options.attention.exchange
    return options.plan(gather_sequence(exchange, packed, options.num_ranks), algorithm.config)
