"""The table of the GPUs of a program's ranks, passed to its custom calls as an attribute."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator, Groups
from jax_cp_dispatch._ranks.gpu.world import connected_shared_memory_groups

_mesh_around: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh_around", default=None)


@contextlib.contextmanager
def remember_mesh(ctx: Any) -> Iterator[None]:
    """Remembers the mesh while axes are made manual; inside, types show an abstract mesh."""
    token = _mesh_around.set(_concrete(ctx) or _mesh_around.get())
    try:
        yield
    finally:
        _mesh_around.reset(token)


def gpu_attributes(
    memory: str, ctx: Any, comm: Communicator, groups: Groups | None, what: str
) -> dict[str, Any]:
    """Returns the attributes `device_table` and `memory` of the custom call of one rank.

    Args:
      memory: in which the ranks meet: "devices" of this process, or a "slab" per process.
      ctx: of the lowering rule.
      comm: the ranks of the call; without axes one device holds everything.
      groups, what: not needed; the table names the processes.
    """
    if not comm.axis_names:
        return all_ranks_here()
    if runtime.cuda is not None:
        runtime.cuda.set_process(jax.process_index())
    devices = _in_order(ctx, comm)
    return {"device_table": np.array([_entry(d) for d in devices], np.int64), "memory": memory}


def what_pointers_lack(ctx: Any, comm: Communicator) -> str | None:
    """Returns which processes of a group have not mapped each other's memory; None if all have."""
    shared_memory_groups = connected_shared_memory_groups()
    if len(set(shared_memory_groups)) < 2:
        return None
    devices = _in_order(ctx, comm)
    for group in devices.reshape(-1, comm.num_ranks):
        first, *others = [device.process_index for device in group]
        for other in others:
            if shared_memory_groups[first] != shared_memory_groups[other]:
                return f"processes {first} and {other} reach each other over the network only"
    return None


def _in_order(ctx: Any, comm: Communicator) -> np.ndarray:
    """Returns the devices of all ranks, group by group."""
    mesh = _concrete(ctx) or _mesh_around.get()
    abstract = getattr(ctx.module_context.axis_context, "mesh", mesh)
    if mesh is None or mesh.axis_names != abstract.axis_names or mesh.shape != abstract.shape:
        # The default of jax.make_mesh; the devices compare it with the program.
        mesh = abstract
        devices = np.array(jax.devices()[: mesh.size]).reshape(tuple(mesh.shape.values()))
    else:
        devices = mesh.devices
    order = [*comm.group_axes, *comm.axis_names]
    order += [axis for axis in mesh.axis_names if axis not in order]  # of one device each
    devices = devices.transpose([mesh.axis_names.index(axis) for axis in order]).reshape(-1)
    if devices.size % comm.num_ranks:
        raise ValueError(
            f"{devices.size} devices cannot be divided into groups of {comm.num_ranks} ranks."
        )
    return devices


def all_ranks_here() -> dict[str, Any]:
    """Returns the attributes if one device holds the rows of all ranks."""
    return {"device_table": np.array([-1], np.int64), "memory": "devices"}


def _concrete(ctx: Any) -> Any:
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty else None


def _entry(device: Any) -> int:
    """Encodes a process and its device in one number, which csrc/cuda/memory.h decodes."""
    ordinal = device.local_hardware_id
    return device.process_index << 16 | (device.id if ordinal is None else ordinal)
