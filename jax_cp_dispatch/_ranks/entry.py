"""The entry of every collective call: reads its ranks and its context."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_cp_dispatch._ranks.axis import AxisName, check_axis_name, check_mesh, other_axes
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.deadline import check_deadline, deadline_milliseconds
from jax_cp_dispatch._ranks.implementations import check_groups, check_implementation
from jax_cp_dispatch._ranks.place import Place, find_place


def find_ranks(
    op: str,
    axis_name: AxisName,
    arrays: Sequence[Any],
    *,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> tuple[Communicator, Place]:
    """Reads the ranks of a call of `op`, and its context.

    Args:
      op: the public operation, for error messages.
      arrays: of the call; their types may determine the mesh.
      axis_name, mesh, implementation, deadline: of the caller.
    Returns:
      The ranks and the context. If the mesh is not known yet, the number of ranks is 0.
    Raises:
      TypeError, ValueError, NotImplementedError: an argument is invalid.
    """
    names = check_axis_name(op, axis_name)
    check_mesh(op, mesh)
    check_implementation(op, implementation)
    comm = Communicator(
        axis_names=names,
        implementation=implementation,
        deadline_ms=deadline_milliseconds(op, check_deadline(op, deadline)),
    )
    place = find_place(op, names, mesh, arrays)
    if place.is_global and not place.open_axes:  # otherwise the lowering knows them
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
