"""The ranks of a collective call: axes, devices, and how long they wait for each other."""

import contextvars
import dataclasses
import functools
import math
import numbers
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._jax_private import get_concrete_mesh

AxisName = str | tuple[str, ...]


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes of a keyword, or of an entry of a `PartitionSpec`: one, several or none."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


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


Groups = tuple[tuple[Any, ...], ...]
"""The device of each rank, group by group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communicator:
    """The ranks of one call; without axes it does not communicate. Groups are independent."""

    axis_names: tuple[str, ...] = ()  # on which a device's index is its rank, major axis first
    num_ranks: int = 0  # of one group; 0 without axes
    group_axes: tuple[str, ...] = ()  # on which a device's index is its group
    open_axes: tuple[str, ...] = ()  # that the lowering must make manual
    implementation: str | None = None  # the caller's choice; None selects one
    deadline: float | None = None  # seconds that a rank waits for another; None: the default
    site: int | None = None  # the number of the call in its program; None until it is lowered

    def inside(self, mesh: Any) -> "Communicator":
        """Returns the same ranks with all axes of `mesh` manual."""
        groups = other_axes(mesh, self.axis_names)
        return dataclasses.replace(self, group_axes=groups, open_axes=())

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes that every handler reads; GPUs have another default deadline."""
        return {
            "axis": ",".join(self.axis_names),
            "num_ranks": np.int64(self.num_ranks),
            "deadline_ms": np.int64(deadline_ms(self.deadline)),
        }


DEFAULT_DEADLINE, _OF_ONE_PROCESS_ON_GPUS, _OF_SEVERAL_ON_GPUS = 60.0, 600.0, 12 * 3600.0
"""Seconds that the ranks of one call wait for the last of them.

On GPUs, a rank that comes later costs its channel, and its results are NaN. In a job of several
processes, the heartbeat of `jax.distributed` ends the job within two minutes if one of them ends,
so the deadline is for ranks that live: it outlasts a compilation, a checkpoint and a working day in
a debugger. `WaitLog` says who is missing long before. One process has no heartbeat, and starts a
program on all its GPUs at once: one that does not come has failed, and the process may be
unable to end before the others give up.
"""

_VARIABLE = "JAX_CP_DISPATCH_DEADLINE"
_LONGEST = 1e8  # three years; the handlers' clock counts nanoseconds in 64 bits
_NEEDS = "a positive number of seconds"


def check_deadline(op: str, deadline: Any) -> None:
    if isinstance(deadline, bool) or not isinstance(deadline, numbers.Real):
        raise TypeError(f"{op}: deadline is {deadline!r}; it needs to be {_NEEDS}.")
    seconds: Any = deadline  # an integer may exceed all floats
    if not 0 < seconds < math.inf:
        raise ValueError(f"{op}: deadline is {deadline}; it needs to be {_NEEDS}.")


def deadline_ms(deadline: float | None, on_gpus: bool = False) -> int:
    """Returns a checked deadline in milliseconds; None is that of the environment or platform."""
    text = os.environ.get(_VARIABLE)
    if deadline is None and text is None:
        deadline = DEFAULT_DEADLINE
        if on_gpus:
            is_alone = jax.process_count() == 1
            deadline = _OF_ONE_PROCESS_ON_GPUS if is_alone else _OF_SEVERAL_ON_GPUS
    elif deadline is None:
        try:
            deadline = float(text or "")
        except ValueError:
            deadline = math.nan
        if not 0 < deadline < math.inf:
            raise ValueError(f"{_VARIABLE} is {text!r}; it needs to be {_NEEDS}.")
    return max(1, round(1000 * float(min(deadline, _LONGEST))))


# ---- Identifies a custom call across processes, and the devices of its ranks.

mesh_around: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh_around", default=None)
"""The mesh of the program while axes are made manual; inside, types show an abstract mesh."""


def call_site(ctx: Any, comm: Communicator) -> int:
    """Returns the number of a call in the program that is lowered, as channels of JAX are numbered.

    All processes that lower the program return the same. The calls of an inner function that is
    lowered once share a number.
    """
    return ctx.module_context.new_channel() if comm.site is None else comm.site


def call_site_attributes(
    transport: str, ctx: Any, comm: Communicator, groups: Groups | None, what: str
) -> dict[str, Any]:
    """Returns the attributes `transport`, `signature` and `processes` of a custom call.

    `what` is the operation with its static parameters; arrays are appended.
    """
    arrays = " -> ".join(
        ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in avals)
        for avals in (ctx.avals_in, ctx.avals_out)
    )
    axis, number = ",".join(comm.axis_names), ""
    processes: list[int] = []  # empty if no group spans several
    if transport == "shared_memory":
        if groups is None:
            raise NotImplementedError(
                "a program over several processes needs a mesh of devices. Make it with "
                "jax.make_mesh, or set it with jax.set_mesh."
            )
        processes = [device.process_index for group in groups for device in group]
        number = f", call {call_site(ctx, comm)} of its program"
    return {
        "transport": transport,
        "signature": f"{what} over axis '{axis}' of {comm.num_ranks} ranks{number}: {arrays}",
        "processes": np.array(processes, np.int64),
    }


def mesh_groups(
    mesh: Any, axis_names: Sequence[str], group_axes: Sequence[str], *, are_numbered: bool = False
) -> Groups | None:
    """Returns the devices of the ranks on a mesh, or on the one that is set if it is None.

    Or, if `are_numbered`, the numbers of the devices in the mesh. None if the devices of the mesh
    are unknown; () for a call without ranks.
    """
    if not axis_names:
        return ()
    for found in mesh, mesh_around.get(), get_concrete_mesh():
        is_concrete = isinstance(found, jax.sharding.Mesh) and not found.empty
        if is_concrete and (mesh is None or found.shape_tuple == mesh.shape_tuple):
            break
    else:
        return None
    order = [*group_axes, *axis_names]
    order += [name for name in found.axis_names if name not in order]  # of one device each
    devices = np.arange(found.size).reshape(found.devices.shape) if are_numbered else found.devices
    devices = devices.transpose([found.axis_names.index(name) for name in order])
    num_groups = int(np.prod([found.shape[name] for name in group_axes], dtype=int))
    return tuple(map(tuple, devices.reshape(num_groups, -1)))
