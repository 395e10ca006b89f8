"""`stack_plans`: plans of several batches as one, with common static sizes."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from jax_cp_dispatch.planning.plan import Plan

_OP = "stack_plans"

_CAPACITIES = ("q_capacity", "kv_capacity", "max_cut_pieces")
# What unused entries contain; those of all other fields are 0.
_UNUSED = {"dst_rank": -1, "cut_pieces": -1, "run_row": np.iinfo(np.int32).max}


def stack_plans(plans: Iterable[Plan]) -> Plan:
    """Returns one plan whose arrays have a leading axis over `plans`, padded to common sizes.

    Use it for the groups of a batch that is sharded over `batch_axis`, one plan for each, in the
    order of the batch: pass the result to `Documents.with_plan`. Or use it for micro-batches:
    `jax.lax.scan` over the result gives each step its own plan, in one compiled program. For both,
    stack the groups of each micro-batch, then the micro-batches.

    Call on the host, or anywhere with traced plans. NumPy arrays give NumPy. Different numbers of
    plans, or other capacities, compile anew; fix the capacities in `PlanConfig`.

    Args:
      plans: all of `plan_attention` or all of `place_tokens`, for the same ranks, tokens per rank
        and mask.
    Returns:
      A plan with the largest capacities. Its `imbalance` is the largest of all
      plans, and its numbers of moved tokens are sums. Call `validate` and `describe` on the single
      plans.
    Raises:
      TypeError, ValueError: there is no plan, or the plans differ in more than capacities.
    """
    if not isinstance(plans, Iterable):
        raise TypeError(f"{_OP}: got {type(plans).__name__}. Pass a list of plans.")
    plans = list(plans)
    _check(plans)
    capacities = {name: max(getattr(plan, name) for plan in plans) for name in _CAPACITIES}
    flat = [
        jax.tree_util.tree_flatten_with_path(dataclasses.replace(plan, **capacities))
        for plan in plans
    ]
    leaves, tree = zip(*(leaves for leaves, _ in flat), strict=True), flat[0][1]
    return jax.tree.unflatten(
        tree,
        [
            _stacked(str(getattr(of_plans[0][0][-1], "name", "")), [x for _, x in of_plans])
            for of_plans in leaves
        ],
    )


def _check(plans: list[Plan]) -> None:
    if not plans:
        raise ValueError(f"{_OP}: got an empty list. Pass at least one plan.")
    for plan in plans:
        check_plan(_OP, plan)
    if len({plan.is_placed for plan in plans}) > 1:
        raise TypeError(
            f"{_OP}: some plans are those of a placement, others move queries. Pass plans of "
            "plan_attention, or plans of place_tokens."
        )
    for name in ("world_size", "num_tokens", "batch", "mask"):
        values = [getattr(plan, name) for plan in plans]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{_OP}: {name} is {values}; it needs to be the same in all plans. Plan batches of "
                "one shape (by lengths, pass columns=) for the same ranks, with the same mask."
            )
    shapes = [np.shape(plan.fingerprint) for plan in plans]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{_OP}: the plans have fingerprints of shapes {shapes}. Stack plans of all ranks "
            "only, or stacks of the same number of plans."
        )


def _stacked(name: str, arrays: list[Any]) -> Shaped[Array | np.ndarray, "..."]:
    xp = np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
    shape = np.max([x.shape for x in arrays], axis=0)

    def padded(x):
        missing = [(0, size - have) for have, size in zip(x.shape, shape, strict=True)]
        return xp.pad(x, missing, constant_values=_UNUSED.get(name, 0))

    return xp.stack([padded(x) for x in arrays])


def is_stack(plan: Plan | None) -> bool:
    """Whether this is a result of `stack_plans`, or a part of it with its leading axis."""
    return plan is not None and plan.fingerprint.ndim > 2


def is_of_all(plan: Plan | None) -> bool:
    """Whether this is one plan, for all rows of a batch."""
    return plan is not None and not is_stack(plan)


def plan_of_group(op: str, plan: Plan) -> Plan:
    """Returns the plan of this group of ranks, which alone it has of stacked ones."""
    if not is_stack(plan):
        return plan
    if plan.fingerprint.shape[:-2] != (1,):
        raise ValueError(
            f"{op}: got stacked plans, of {list(plan.fingerprint.shape[:-2])}. Pass one of them: "
            "each step of jax.lax.scan has its own, and jax.tree.map(lambda x: x[i], plans) is the "
            "i-th. Of groups of batch rows, in_specs=documents.specs(axis_name, batch_axis) does."
        )
    return jax.tree.map(lambda x: x[0], plan)


def check_groups(op: str, plan: Any, *, num_groups: int, batch: tuple[str, ...]) -> None:
    """Requires one plan for each group of the batch; a single group may have it in a stack."""
    held = plan.fingerprint.shape[-2] if plan.fingerprint.ndim > 1 else 1
    if held != plan.world_size:
        raise ValueError(
            f"{op}: the plan is the part of {held} of {plan.world_size} ranks. Pass the plan of "
            "all ranks, or global arrays with the part of each rank as its shard; or call it "
            "inside jax.shard_map, with in_specs=documents.specs(axis_name)."
        )
    groups = f"batch_axis {batch!r} splits the batch into {num_groups} independent groups"
    if not is_stack(plan):
        if num_groups > 1:
            raise ValueError(
                f"{op}: got a single plan, but {groups}. Plan the rows of each group and pass "
                "Documents.with_plan(stack_plans([...])), one plan per group, or place them by "
                "place_tokens(num_groups=...). Or pass batch_axis=() and a plan for all rows, "
                "which each group then computes."
            )
        return
    if plan.fingerprint.shape[:-2] != (num_groups,):
        groups = groups if num_groups > 1 else "the batch is not sharded"
        raise ValueError(
            f"{op}: got plans stacked as {list(plan.fingerprint.shape[:-2])}, but {groups}. Pass "
            "stack_plans of one plan per group, and name the axis of the groups as batch_axis. For "
            "micro-batches, call attention inside jax.lax.scan over their plans."
        )


def check_plan(op: str, plan: Any) -> None:
    """Requires a plan."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"{op}: plan is of type {type(plan).__name__}; it needs to be a Plan. Pass "
            "plan_attention(...) or place_tokens(...).plan."
        )
