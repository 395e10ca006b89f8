"""The mesh axes whose devices are the ranks of a call, and their mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

AxisName = str | tuple[str, ...]


def check_axis_name(op: str, axis_name: Any) -> tuple[str, ...]:
    """Requires one mesh axis, or several different ones."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not all(isinstance(x, str) for x in names):
        raise TypeError(
            f"{op}: axis_name is {axis_name!r}; it needs the name of one mesh axis, or a tuple of "
            "several."
        )
    names = tuple(names)
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"{op}: axis_name is {axis_name!r}; it needs one mesh axis, or several different ones."
        )
    return names


def check_mesh(op: str, mesh: Any) -> None:
    """Requires a mesh or None."""
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"{op}: mesh is {mesh!r}; it needs to be a jax.sharding.Mesh, or omitted.")


def num_ranks_here(op: str, axis_name: AxisName, instead: str) -> int:
    """Returns the size of the axis inside `jax.shard_map`; outside, raises and names `instead`.

    `axis_name` is checked.
    """
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{op}: axis_name {axis_name!r} is not manual here, and {op} takes the arrays of one "
            f"rank. Call it inside jax.shard_map over {axis_name!r}; for the arrays of all ranks "
            f"use {instead}."
        ) from None


@functools.lru_cache(maxsize=256)
def other_axes(mesh: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that number the groups: all others with several devices."""
    return tuple(x for x in mesh.axis_names if x not in names and mesh.shape[x] > 1)


def rank_index(axes: tuple[str, ...]) -> Any:
    """Returns a device's index on mesh axes as one number; device numbers do not determine it."""
    if not axes:
        return jnp.int32(0)
    first, *others = axes
    return jax.lax.axis_index(axes if others else first)  # the second is much cheaper
