"""The table of the GPUs of a program's ranks, passed to its custom calls as an attribute."""

from typing import Any

import jax
import numpy as np

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator, Groups, default_deadline_ms
from jax_cp_dispatch._ranks.gpu.peers import local_ordinals, number_in_process
from jax_cp_dispatch._ranks.gpu.world import connected_slabs


def gpu_attributes(
    memory: str, ctx: Any, comm: Communicator, groups: Groups | None, what: str
) -> dict[str, Any]:
    """Returns the attributes of the custom call of one rank that tell of all ranks.

    Args:
      memory: in which the ranks meet: "devices" of this process, or a "slab" per process.
      ctx: of the lowering rule.
      comm: the ranks of the call; without axes one device holds everything.
      groups: the devices of the ranks, if they are known.
      what: not needed.
    """
    if not comm.axis_names:
        return all_ranks_here()
    if runtime.cuda is not None:
        runtime.cuda.set_process(jax.process_index(), local_ordinals())
    devices = [device for group in groups or _first_devices(ctx, comm) for device in group]
    return {
        "device_table": np.array([_entry(d) for d in devices], np.int64),
        "memory": memory,
        "deadline_ms": np.int64(comm.deadline_ms or default_deadline_ms(on_gpus=True)),
    }


def what_pointers_lack(ctx: Any, comm: Communicator, groups: Groups | None) -> str | None:
    """Returns which processes of a group have not mapped each other's memory; None if all have."""
    slabs = connected_slabs()
    if slabs is None or len(set(slabs.memory_groups)) < 2:
        return None
    for group in groups or _first_devices(ctx, comm):
        first, *others = [device.process_index for device in group]
        for other in others:
            if slabs.memory_groups[first] != slabs.memory_groups[other]:
                return f"processes {first} and {other} reach each other over the network only"
    return None


def _first_devices(ctx: Any, comm: Communicator) -> Groups:
    """Returns the default of jax.make_mesh; the devices compare it with the program."""
    size = ctx.module_context.axis_context.mesh.size
    if size % comm.num_ranks:
        raise ValueError(f"{size} devices cannot be divided into groups of {comm.num_ranks} ranks.")
    devices = np.array(jax.devices()[:size])
    return tuple(map(tuple, devices.reshape(-1, comm.num_ranks)))


def all_ranks_here() -> dict[str, Any]:
    """Returns the attributes if one device holds the rows of all ranks."""
    return {"device_table": np.array([-1], np.int64), "memory": "devices"}


def _entry(device: Any) -> int:
    """Encodes a process and its device in one number, which csrc/cuda/memory.h decodes."""
    return device.process_index << 16 | number_in_process(device)
