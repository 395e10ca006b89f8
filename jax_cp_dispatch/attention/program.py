"""The program of `context_parallel_attention`: its options, and the part of each rank."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import cast

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.algorithms import Algorithm, Balanced, Placed, Rotating, Ulysses
from jax_cp_dispatch.attention.expanded_heads import with_own_heads
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.planned.balanced import attend_balanced
from jax_cp_dispatch.attention.planned.placed import attend_placed
from jax_cp_dispatch.attention.rotating.call import rotating_attention
from jax_cp_dispatch.attention.ulysses.attend import attend_ulysses
from jax_cp_dispatch.documents.gather import gather_sequence
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.global_call.mesh_axes import MeshAxes
from jax_cp_dispatch.global_call.on_all_ranks import on_all_ranks
from jax_cp_dispatch.planner import Plan, PlanConfig, plan_attention
from jax_cp_dispatch.planner.inside_jit import plan_of_rank
from jax_cp_dispatch.planner.stack import is_stack


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

    def plan(self, packed: PackedMask, config: PlanConfig) -> Plan:
        """Plans balanced attention of these documents, on all ranks."""
        mask, *documents = packed
        sizes = {"world_size": self.num_ranks, "mask": mask}
        return plan_attention(*documents, **sizes, config=config)


@partial(jax.jit, static_argnames="options")
def attend_global(
    operands: Operands, plan, packed: PackedMask, *, options: GlobalOptions
) -> Outputs:
    """Computes attention from global arrays."""
    axes = options.axes
    sequence = P(axes.batch, axes.axis_name)
    rows = P(*sequence, axes.heads)
    of_plan = sequence if is_stack(plan) else P(axes.axis_name)
    attention = options.attention
    of_keys, of_weights = rows, P()
    if attention.expansion is None:
        k, v = (axes.repeat_kv_heads(x, operands.q.shape[2]) for x in operands.moved)
        operands = operands._replace(k=k, v=v)
    else:
        of_keys, of_weights = sequence, attention.expansion.specs
        expansion = with_own_heads(attention.op, attention.expansion, operands, axes)
        attention = dataclasses.replace(attention, expansion=expansion)
        options = dataclasses.replace(options, attention=attention)
    in_specs = (*Operands(rows, of_keys, of_keys, P(axes.heads), of_weights), of_plan, sequence)
    out_specs = Outputs(
        rows,
        rows if attention.return_lse else None,
        P(axes.heads) if attention.return_max_logits else None,
    )
    return on_all_ranks(
        partial(_local, options),
        (*operands, plan, packed),
        axes=axes,
        in_specs=in_specs,
        out_specs=out_specs,
        num_differentiable=len(operands),
    )


def _local(options: GlobalOptions, *sharded) -> Outputs:
    """Computes one rank's part."""
    *arrays, plan, packed = sharded
    outputs = _attend(options, Operands(*arrays), plan, packed)
    if outputs.max_logits is None or not options.axes.batch:
        return outputs
    largest = lax.stop_gradient(outputs.max_logits)
    return outputs._replace(max_logits=lax.pmax(largest, options.axes.batch))


def _attend(options: GlobalOptions, operands: Operands, plan, packed: PackedMask) -> Outputs:
    algorithm, attention = options.algorithm, options.attention
    if is_stack(plan):  # of which this group has one
        plan = jax.tree.map(lambda x: x[0], plan)
    if isinstance(algorithm, Placed):
        return attend_placed(attention, operands, plan, packed)
    if isinstance(algorithm, Balanced):
        if plan is None:
            plan = named_context(_plan_on_ranks(options, algorithm, packed))
            packed = PackedMask(plan.mask)  # nothing to compare
        return attend_balanced(attention, operands, plan, packed)
    if isinstance(algorithm, Ulysses):
        return attend_ulysses(attention, operands, packed)
    rotating = cast(Rotating, algorithm)  # "auto" has been replaced
    return rotating_attention(attention, rotating, operands, packed)


def _plan_on_ranks(options: GlobalOptions, algorithm: Balanced, packed) -> Plan:
    """Makes the same plan on every rank, from the documents of all."""
    exchange, num_ranks = options.attention.exchange, options.num_ranks
    packed = gather_sequence(exchange, packed, num_ranks)
    rank = lax.axis_index(exchange.axis_name)
    return plan_of_rank(packed, world_size=num_ranks, config=algorithm.config, rank=rank)
