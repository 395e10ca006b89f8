"""Identifies a custom call across processes, and the processes of its ranks."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.mesh import get_concrete_mesh  # private, but get_mesh fails during tracing

from jax_cp_dispatch._ranks.communicator import Communicator, Groups
from jax_cp_dispatch._ranks.processes import program_begins


def call_site_attributes(
    transport: str, ctx: Any, comm: Communicator, groups: Groups | None, what: str
) -> dict[str, Any]:
    """Returns the attributes `transport`, `signature` and `processes` of a custom call.

    Args:
      transport: name of the chosen one.
      ctx: context of the lowering rule, with the operands and results of one rank.
      comm: the ranks of the call.
      groups: see `groups_of_program`.
      what: the operation with its static parameters; arrays are appended.
    """
    arrays = " -> ".join(
        ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in avals)
        for avals in (ctx.avals_in, ctx.avals_out)
    )
    axis = ",".join(comm.axis_names)
    signature = f"{what} over axis '{axis}' of {comm.num_ranks} ranks: {arrays}"
    processes: list[int] = []  # empty if no group spans several
    if transport == "shared_memory":
        if groups is None:
            raise NotImplementedError(
                "a program over several processes needs a mesh of devices. Make it with "
                "jax.make_mesh, or set it with jax.set_mesh."
            )
        program_begins()
        processes = [process for group in groups for process in group]
    return {
        "transport": transport,
        "signature": signature,
        "processes": np.array(processes, np.int64),
    }


def groups_of_program(ctx: Any, comm: Communicator) -> Groups | None:
    """Returns the processes of the ranks of the program that is being lowered.

    Args:
      ctx: of the lowering rule.
      comm: the ranks of the call.
    Returns:
      None if there is one process, or if the devices of the mesh are unknown.
    """
    if jax.process_count() == 1:
        return None
    if not comm.axis_names:
        return ()
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return groups_of_mesh(mesh, comm.axis_names, comm.group_axes)


def groups_of_mesh(
    mesh: Any, axis_names: Sequence[str], group_axes: Sequence[str]
) -> Groups | None:
    """Returns the same for a mesh."""
    if jax.process_count() == 1:
        return None
    if not isinstance(mesh, jax.sharding.Mesh):
        found = get_concrete_mesh()
        if found.empty or (mesh is not None and found.shape_tuple != mesh.shape_tuple):
            return None
        mesh = found
    order = [*group_axes, *axis_names]
    order += [name for name in mesh.axis_names if name not in order]  # of one device each
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in order])
    num_groups = int(np.prod([mesh.shape[name] for name in group_axes], dtype=int))
    return tuple(tuple(d.process_index for d in row) for row in devices.reshape(num_groups, -1))
