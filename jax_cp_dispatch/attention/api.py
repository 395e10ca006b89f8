"""`context_parallel_attention`: attention over a mesh axis, from global arrays."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P, reshard
from jaxtyping import Array, Float, Int

from jax_cp_dispatch.attention.balanced import balanced_attention
from jax_cp_dispatch.dispatch import DEFAULT_DEADLINE
from jax_cp_dispatch.planner import AttentionPlan, PlanConfig, plan_attention

ALGORITHMS = ("balanced",)
HostOrDevice = Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class _Options:
    mesh: Mesh | AbstractMesh
    axis_name: str
    batch_axis: str | None
    head_axis: str | None
    config: PlanConfig
    scale: float | None
    logit_soft_cap: float | None
    deadline: float


def context_parallel_attention(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T K Hv"],
    *,
    axis_name: str,
    algorithm: str,
    mesh: Mesh | AbstractMesh | None = None,
    segment_ids: Int[HostOrDevice, "B T"] | None = None,
    positions: Int[HostOrDevice, "B T"] | None = None,
    plan: AttentionPlan | None = None,
    config: PlanConfig = PlanConfig(),
    batch_axis: str | None = None,
    head_axis: str | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    deadline: float = DEFAULT_DEADLINE,
) -> Float[Array, "B T N Hv"]:
    """Causal attention over packed documents, the sequence sharded over a mesh axis.

    Call outside `jax.shard_map`, under `jit` or not, with global arrays. Differentiable once, in
    reverse mode.

    The plan comes from the segment ids. Concrete ids are planned at once, with buffers as large as
    this batch needs; pass the plan of `plan_attention` in to choose when. Traced ids (and those of
    a batch that is sharded itself) are planned inside the program, with the capacities of `config`,
    whose defaults always fit but give every rank room for all keys.

    Args:
      q: queries, T tokens in document order, sharded or to be sharded over `axis_name` in equal
        contiguous parts.
      k: keys; K divides N.
      v: values.
      axis_name: the mesh axis over which the sequence is sharded; its size W divides T.
      algorithm: "balanced": every rank computes an equal share of the query-key pairs.
      mesh: the mesh; None is the one set by `jax.set_mesh`.
      segment_ids: the document of each token, 0 = padding; None: each batch row is one document.
      positions: the place of each token in its document; None if the segment ids tell documents
        apart.
      plan: a plan for these documents, instead of segment ids.
      config: block size and capacities of plans made here.
      batch_axis: mesh axis over which B is sharded; each of its groups plans for itself.
      head_axis: mesh axis over which N and K are sharded.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      deadline: seconds until an exchange gives up on a rank that has not come.
    Returns:
      The output, sharded as q, in q's dtype; zero for padding.
    Raises:
      TypeError, ValueError: an axis, a size or a choice does not fit; what, and what to do.
      jax.errors.JaxRuntimeError: when the program runs, see `dispatch`.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"context_parallel_attention: algorithm is {algorithm!r}; it needs to be one of "
            f"{', '.join(map(repr, ALGORITHMS))}."
        )
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    axes = {"axis_name": axis_name, "batch_axis": batch_axis, "head_axis": head_axis}
    _check(q, k, v, mesh, axes, segment_ids, plan)
    if segment_ids is None and plan is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    options = _Options(
        mesh, **axes, config=config, scale=scale, logit_soft_cap=logit_soft_cap, deadline=deadline
    )
    is_traced = any(isinstance(x, Tracer) for x in (segment_ids, positions))
    if segment_ids is not None and not is_traced and batch_axis is None:
        world_size = mesh.shape[axis_name]
        plan = plan_attention(segment_ids, positions, world_size=world_size, config=config)
    documents = (segment_ids, positions) if plan is None else None
    return _balanced(q, k, v, plan, documents, options=options)


@partial(jax.jit, static_argnames="options")
def _balanced(q, k, v, plan, documents, *, options: _Options):
    sequence = P(options.batch_axis, options.axis_name)
    rows = P(options.batch_axis, options.axis_name, options.head_axis)

    def local(q, k, v, plan, documents):
        if plan is None:
            world_size = options.mesh.shape[options.axis_name]
            whole = jax.tree.map(
                lambda x: jax.lax.all_gather(x, options.axis_name, axis=1, tiled=True), documents
            )
            plan = plan_attention(*whole, world_size=world_size, config=options.config)
        return balanced_attention(
            q,
            k,
            v,
            plan,
            axis_name=options.axis_name,
            scale=options.scale,
            logit_soft_cap=options.logit_soft_cap,
            deadline=options.deadline,
        )

    in_specs = (rows, rows, rows, P(options.axis_name), sequence)
    attend = jax.shard_map(local, mesh=options.mesh, in_specs=in_specs, out_specs=rows)
    operands = (q, k, v, plan, documents)
    if AxisType.Explicit in options.mesh.axis_types:  # there, shard_map moves nothing by itself
        shardings = [NamedSharding(options.mesh, spec) for spec in in_specs]
        operands = (
            jax.tree.map(partial(reshard, out_shardings=sharding), operand)
            for operand, sharding in zip(operands, shardings, strict=True)
        )
    return attend(*operands)


def _check(q, k, v, mesh, axes, segment_ids, plan) -> None:
    op = "context_parallel_attention"
    for keyword, name in axes.items():
        if name is not None and name not in mesh.axis_names:
            raise ValueError(
                f"{op}: {keyword} is {name!r} but the mesh has axes {tuple(mesh.axis_names)}. Name "
                "one of these, or pass the mesh that has it."
            )
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(
            f"{op}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; they need "
            "[B, T, heads, features] with equal B and T."
        )
    for dim, size, keyword in (
        ("B", q.shape[0], "batch_axis"),
        ("T", q.shape[1], "axis_name"),
        ("N", q.shape[2], "head_axis"),
        ("K", k.shape[2], "head_axis"),
    ):
        name = axes[keyword]
        if name is not None and size % mesh.shape[name]:
            raise ValueError(
                f"{op}: {dim} is {size} but mesh axis {name!r} has {mesh.shape[name]} devices, "
                "which must divide it. Pad the arrays (segment 0 is padding), or use another mesh."
            )
    if plan is not None and segment_ids is not None:
        raise ValueError(f"{op}: got both plan and segment_ids; pass one of them.")
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f"{op}: segment_ids has shape {segment_ids.shape} but q has B, T = {q.shape[:2]}; they "
            "need to be equal."
        )
    if plan is not None and plan.world_size != mesh.shape[axes["axis_name"]]:
        raise ValueError(
            f"{op}: the plan is for world_size={plan.world_size} but mesh axis "
            f"{axes['axis_name']!r} has {mesh.shape[axes['axis_name']]} devices. Plan again with "
            "that world_size."
        )
