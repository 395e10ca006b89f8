"""The GPUs of a program's ranks: their numbers and memory, and the table for custom calls."""

import functools
from typing import Any

import jax
import numpy as np

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator, Groups, default_deadline_ms
from jax_cp_dispatch._ranks.gpu.world import connected_slabs
from jax_cp_dispatch._ranks.job import publish, read_from

_OP = "peer_access"
_TIMEOUT = 600.0  # seconds until another process of the program lowers it too


@functools.cache
def _numbers() -> dict[Any, int]:
    by_process: dict[int, list[Any]] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        by_process.setdefault(device.process_index, []).append(device)
    return {device: i for devices in by_process.values() for i, device in enumerate(devices)}


def number_in_process(device: Any) -> int:
    """Returns the number of a device among those of its process; all processes return the same.

    Only the process itself knows how CUDA numbers its devices.
    """
    number = _numbers().get(device)
    return int(device.id) if number is None else number  # a device of another machine


def local_ordinals() -> list[int]:
    """Returns how CUDA numbers the devices of this process, in their order."""
    own = jax.process_index()
    ordinals = [(n, d) for d, n in _numbers().items() if d.process_index == own]  # in order
    return [n if d.local_hardware_id is None else d.local_hardware_id for n, d in ordinals]


def why_no_peer_access(groups: Groups) -> str | None:
    """Returns why GPUs of one group do not reach each other's memory; None if all do.

    Each group lies in one process. A process tries its own GPUs, once, and tells the other
    processes of the program, so that all of them lower it alike.
    """
    numbers_of = lambda group: tuple(sorted(set(map(number_in_process, group))))
    sets = {(group[0].process_index, numbers_of(group)) for group in groups if group}
    sets = sorted(found for found in sets if len(found[1]) > 1)
    for process, numbers in sets:
        if process == jax.process_index():
            _reason(process, numbers)  # others may wait for it, so this comes before their turn
    for process, numbers in sets:
        if reason := _reason(process, numbers):
            return f"process {process}: {reason}" if jax.process_count() > 1 else reason
    return None


@functools.cache
def _reason(process: int, numbers: tuple[int, ...]) -> str:
    name = "-".join(map(str, numbers))
    if process != jax.process_index():
        if process >= jax.process_count():
            return ""  # a program for another machine
        try:
            return read_from(_OP, name, process, _TIMEOUT)
        except RuntimeError as error:
            return str(error)
    ordinals, (num_gpus, _) = local_ordinals(), runtime.cuda.device_count()
    reason = ""
    if numbers[-1] < len(ordinals) and max(ordinals) < num_gpus:  # otherwise for another machine
        reason = runtime.cuda.connect_peers([ordinals[number] for number in numbers])
    if jax.process_count() > 1:
        publish(_OP, name, reason)
    return reason


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
