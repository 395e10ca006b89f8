"""Identifies a custom call across processes, and the devices of its ranks."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_cp_dispatch._jax_private import get_concrete_mesh
from jax_cp_dispatch._ranks.communicator import Communicator, Groups

_mesh_around: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh_around", default=None)


@contextlib.contextmanager
def remember_mesh(ctx: Any) -> Iterator[None]:
    """Remembers the mesh while axes are made manual; inside, types show an abstract mesh."""
    mesh = _mesh_of(ctx)
    token = _mesh_around.set(mesh if _is_concrete(mesh) else _mesh_around.get())
    try:
        yield
    finally:
        _mesh_around.reset(token)


def call_site_attributes(
    transport: str, ctx: Any, comm: Communicator, groups: Groups | None, what: str
) -> dict[str, Any]:
    """Returns the attributes `transport`, `signature` and `processes` of a custom call.

    Args:
      transport: name of the chosen one.
      ctx: context of the lowering rule, with the operands and results of one rank.
      comm: the ranks of the call.
      groups: see `program_groups`.
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
        processes = [device.process_index for group in groups for device in group]
    return {
        "transport": transport,
        "signature": signature,
        "processes": np.array(processes, np.int64),
    }


def program_groups(ctx: Any, comm: Communicator) -> Groups | None:
    """Returns the devices of the ranks of the program that is being lowered.

    Args:
      ctx: of the lowering rule.
      comm: the ranks of the call.
    Returns:
      None if the devices of the mesh are unknown; () for a call without ranks.
    """
    if not comm.axis_names:
        return ()
    return mesh_groups(_mesh_of(ctx), comm.axis_names, comm.group_axes)


def mesh_groups(mesh: Any, axis_names: Sequence[str], group_axes: Sequence[str]) -> Groups | None:
    """Returns the same for a mesh, or for the one that is set if it is None."""
    for found in mesh, _mesh_around.get(), get_concrete_mesh():
        if _is_concrete(found) and (mesh is None or found.shape_tuple == mesh.shape_tuple):
            break
    else:
        return None
    order = [*group_axes, *axis_names]
    order += [name for name in found.axis_names if name not in order]  # of one device each
    devices = found.devices.transpose([found.axis_names.index(name) for name in order])
    num_groups = int(np.prod([found.shape[name] for name in group_axes], dtype=int))
    return tuple(map(tuple, devices.reshape(num_groups, -1)))


def _mesh_of(ctx: Any) -> Any:
    return getattr(ctx.module_context.axis_context, "mesh", None)


def _is_concrete(mesh: Any) -> bool:
    return isinstance(mesh, jax.sharding.Mesh) and not mesh.empty
