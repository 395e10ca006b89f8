"""The GPUs of one process: their numbers, and whether they reach each other's memory."""

import functools
from typing import Any

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Groups
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
