"""What every collective call reads first: who its ranks are, and where it stands."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_cp_dispatch._ranks.axis import AxisName, check_axis_name, check_mesh, other_axes
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.deadline import deadline_milliseconds
from jax_cp_dispatch._ranks.implementations import check_groups, check_implementation
from jax_cp_dispatch._ranks.placement import Place, find_place


def find_ranks(
    op: str,
    axis_name: AxisName,
    arrays: Sequence[Any],
    *,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> tuple[Communicator, Place]:
    """Reads what the caller of `op` says about ranks, and where the call stands.

    Args:
      op: begins the message of an error.
      arrays: of the call; their types may tell the mesh.
      axis_name, mesh, implementation, deadline: of the caller.
    Returns:
      The ranks, and the place. In a mesh that is not known yet there are 0 ranks.
    Raises:
      TypeError, ValueError, NotImplementedError: an argument is not what it needs to be.
    """
    names = check_axis_name(op, axis_name)
    check_mesh(op, mesh)
    check_implementation(op, implementation)
    comm = Communicator(
        axis_names=names,
        implementation=implementation,
        deadline_ms=deadline_milliseconds(op, deadline),
    )
    place = find_place(op, names, mesh, arrays)
    if place.is_global and not place.open_axes:  # else the lowering knows
        check_groups(op, implementation, place.groups(names))
    groups = ()
    if not place.is_global:
        groups = tuple(x for x in other_axes(place.mesh, names) if x not in place.open_axes)
    return dataclasses.replace(
        comm,
        num_ranks=place.num_ranks(names) or 0,
        group_axes=groups,
        open_axes=place.open_axes,
    ), place
