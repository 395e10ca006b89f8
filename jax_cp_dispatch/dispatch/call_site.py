"""What tells a custom call apart between processes, and in which of them its ranks are."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_cp_dispatch.processes import program_begins


def call_site_attributes(
    ctx: Any, what: str, axis_names: Sequence[str], group_axes: Sequence[str], num_ranks: int
) -> dict[str, Any]:
    """The attributes `signature` and `processes` of a custom call.

    Args:
      ctx: of the lowering rule, with the operands and results of one rank.
      what: the operation with its static parameters; arrays are added.
      axis_names, group_axes: mesh axes on which a device's place is its rank, and its group.
      num_ranks: of one group.
    """
    arrays = " -> ".join(
        ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in avals)
        for avals in (ctx.avals_in, ctx.avals_out)
    )
    signature = f"{what} over axis '{','.join(axis_names)}' of {num_ranks} ranks: {arrays}"
    processes = _processes(ctx.module_context.axis_context, axis_names, group_axes, num_ranks)
    return {"signature": signature, "processes": np.array(processes, np.int64)}


def _processes(context, axis_names, group_axes, num_ranks) -> list[int]:
    """The process of each device, by group, then rank; nothing where there is one process."""
    if num_ranks == 0 or jax.process_count() == 1:
        return []
    program_begins()
    mesh = getattr(context, "mesh", None)
    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh):
        mesh = jax.sharding.get_mesh() if mesh is None else _concrete(mesh)
    order = [*group_axes, *axis_names]
    order += [name for name in mesh.axis_names if name not in order]  # of one device each
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in order])
    num_groups = int(np.prod([mesh.shape[name] for name in group_axes], dtype=int))
    return [d.process_index for d in devices.reshape(num_groups, num_ranks).flat]


def _concrete(mesh: Any) -> Any:
    found = jax.sharding.get_mesh()
    if found.shape_tuple != mesh.shape_tuple:
        raise NotImplementedError(
            f"a program over several processes needs a mesh of devices; got {mesh}. Make it with "
            "jax.make_mesh, or set it with jax.set_mesh."
        )
    return found
