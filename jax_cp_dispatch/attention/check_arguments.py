"""Checks the arguments of attention over a mesh axis, for all algorithms."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Array

from jax_cp_dispatch._ranks.axis import check_axis_name, check_mesh
from jax_cp_dispatch.attention.local.check_operands import (
    check_arrays,
    check_documents,
    check_operands,
)
from jax_cp_dispatch.attention.local.sink import check_sink
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.packed_mask import PackedMask
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.array_mask import MaskKind
from jax_cp_dispatch.masks.read import check_mask_arrays, read_mask
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan
from jax_cp_dispatch.planner.segment_ids import read_documents

HostOrDevice: TypeAlias = Array | np.ndarray
LAYOUTS = ("contiguous", "zigzag")
_PLANS = {
    AttentionPlan: ("an AttentionPlan", "plan_attention(...)"),
    PlacedPlan: ("a PlacedPlan", "place_tokens(...).plan"),
}


def check_rows(op: str, operands: Operands, segment_ids: Any, positions: Any) -> None:
    """Requires that arrays of one rank, or of all ranks, match."""
    q, k, v, sink, _ = operands
    if v is not None:  # not latent rows, which `read_latents` checks
        _check_qkv(op, q, k, v)
    check_sink(op, sink, q.shape[2])
    check_documents(op, segment_ids, positions, q.shape[:2], "q has B, T =")


def read_rows(
    op: str, operands: Operands, mask: Any, segment_ids: Any, positions: Any
) -> PackedMask:
    """Checks the arrays of one rank, and reads its mask and documents."""
    check_rows(op, operands, segment_ids, positions)
    mask = read_mask(op, mask)
    check_mask_arrays(op, mask, operands.q.shape[:2])
    return PackedMask(mask, *read_documents(op, segment_ids, positions))


def read_rows_of_plan(
    op: str, operands: Operands, plan: Any, mask: Any, segment_ids: Any, positions: Any
) -> PackedMask:
    """Checks the arrays of one rank, and reads what it compares with its plan."""
    check_rows(op, operands, segment_ids, positions)
    return PackedMask(read_mask_of_plan(op, mask, plan), segment_ids, positions)


def _check_qkv(op: str, q: Any, k: Any, v: Any) -> None:
    check_arrays(op, q=q, k=k, v=v)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(
            f"{op}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; they need "
            "[B, T, heads, features] with equal B and T. For queries and keys of "
            "different lengths, use local_attention on one device."
        )
    check_operands(op, q, k, v)


def check_plan(op: str, plan: Any, *kinds: type) -> None:
    """Requires a plan of one of these kinds."""
    if isinstance(plan, kinds):
        return
    names, sources = (" or ".join(texts) for texts in zip(*(_PLANS[k] for k in kinds), strict=True))
    raise TypeError(
        f"{op}: plan is of type {type(plan).__name__}; it needs to be {names}. Pass {sources}."
    )


def read_mask_of_plan(op: str, mask: Any, plan: AttentionPlan | PlacedPlan) -> Mask | MaskKind:
    """Returns the mask of a plan, or the one that is passed beside it, which must be the same.

    The arrays of a mask are compared in the step, by their checksum.
    """
    given: Any = plan.mask if mask is None else read_mask(op, mask)
    if given is not plan.mask and given.kind != plan.mask:
        raise ValueError(
            f"{op}: mask is {given}, but the plan is for {plan.mask}. Omit mask, or plan with "
            f"mask={given}."
        )
    return given


def is_stack(plan: AttentionPlan | PlacedPlan | None) -> bool:
    """Whether this is a result of `stack_plans`, or a part of it with its leading axis."""
    return plan is not None and plan.fingerprint.ndim > 2


def check_groups(op: str, plan: Any, *, num_groups: int, batch: tuple[str, ...]) -> None:
    """Requires one plan for each group of the batch; a single group may have it in a stack."""
    held = plan.fingerprint.shape[-2] if plan.fingerprint.ndim > 1 else 1
    if held != plan.world_size:
        raise ValueError(
            f"{op}: the plan is the part of {held} of {plan.world_size} ranks. Pass the plan of "
            "all ranks, or global arrays with the part of each rank as its shard; inside "
            "jax.shard_map, call the function of one rank."
        )
    groups = f"batch_axis {batch!r} splits the batch into {num_groups} independent groups"
    if not is_stack(plan):
        if num_groups > 1:
            raise ValueError(
                f"{op}: got a single plan, but {groups}. Plan the rows of each group and pass "
                "plan=stack_plans([...]), one plan per group. Or pass batch_axis=() and a plan for "
                "all rows, which each group then computes."
            )
        return
    if plan.fingerprint.shape[:-2] != (num_groups,):
        groups = groups if num_groups > 1 else "the batch is not sharded"
        raise ValueError(
            f"{op}: got plans stacked as {list(plan.fingerprint.shape[:-2])}, but {groups}. Pass "
            "stack_plans of one plan per group, and name the axis of the groups as batch_axis. For "
            "micro-batches, call attention inside jax.lax.scan over their plans."
        )


def check_layout(op: str, layout: Any) -> None:
    """Requires one of the layouts."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"{op}: layout is {layout!r}; it needs to be one of {', '.join(map(repr, LAYOUTS))}."
        )


def check_global(op: str, *, mesh: Any, axis_name: Any, plan: Any) -> None:
    """Checks the arguments of functions for global arrays only."""
    check_mesh(op, mesh)
    check_axis_name(op, axis_name)
    if plan is not None:
        check_plan(op, plan, AttentionPlan, PlacedPlan)
