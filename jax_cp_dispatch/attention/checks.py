"""Arguments of another kind than attention takes: refused in words, before one is looked into."""

from __future__ import annotations

from typing import Any

from jax_cp_dispatch._arguments import check_array
from jax_cp_dispatch._ranks.axis import check_mesh
from jax_cp_dispatch.attention.rotating.layout import LAYOUTS
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan, PlanConfig


def check_arrays(op: str, **arrays: Any) -> None:
    """Arrays of JAX or NumPy; optional ones may be None."""
    optional = ("segment_ids", "positions", "dlse")
    for name, x in arrays.items():
        if x is None and name in optional:
            continue
        check_array(op, name, x)


def check_plan(op: str, plan: Any) -> None:
    """A plan of attention."""
    if not isinstance(plan, AttentionPlan | PlacedPlan):
        raise TypeError(
            f"{op}: plan is of type {type(plan).__name__}; it needs to be an AttentionPlan, as "
            "plan_attention returns it."
        )


def check_layout(op: str, layout: Any) -> None:
    """One of the layouts."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"{op}: layout is {layout!r}; it needs to be one of {', '.join(map(repr, LAYOUTS))}."
        )


def check_global(op: str, *, mesh: Any, axis_name: Any, plan: Any, config: Any) -> None:
    """Of the arguments that only a function outside of `shard_map` has."""
    check_mesh(op, mesh)
    if not isinstance(axis_name, str):
        raise TypeError(
            f"{op}: axis_name is {axis_name!r}; it needs to be the name of one mesh axis, a string."
        )
    if plan is not None:
        check_plan(op, plan)
    if not isinstance(config, PlanConfig):
        raise TypeError(
            f"{op}: config is {config!r}; it needs to be a PlanConfig. Omit it for the default."
        )
