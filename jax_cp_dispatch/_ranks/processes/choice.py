"""Stores what `initialize` chose in this process."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax


class TransportChoice(NamedTuple):
    """The transport between the processes of a job, and the reason.

    Attributes:
      implementation: for ranks on all devices. "shared_memory"; on GPUs "nvshmem" or "cuda_ipc";
        "xla" if no transport of this package reaches all of them; "in_process" for one process.
      reason: why it was chosen, as text.
    """

    implementation: str
    reason: str


_choice: TransportChoice | None = None
_memory_groups: tuple[int, ...] = ()


def transport_choice() -> TransportChoice | None:
    """Returns the choice of `initialize`, or None before that call."""
    return _choice


def share_memory(processes: Iterable[int]) -> bool:
    """Whether these processes exchange through shared memory; the same answer in all of them."""
    return bool(_memory_groups) and len({_memory_groups[process] for process in processes}) <= 1


def num_cpu_devices_here() -> int:
    """Returns the number of CPU devices that share this host's cores, as known to `initialize`."""
    own, devices = jax.process_index(), jax.devices("cpu")
    near = sum(share_memory((own, device.process_index)) for device in devices)
    return max(near, jax.local_device_count("cpu"))


def remember(choice: TransportChoice, memory_groups: Sequence[int] = ()) -> TransportChoice:
    """Stores `choice` for `transport_choice`.

    Args:
      memory_groups: a number per process; those with equal numbers share memory. Empty: none do.
    """
    global _choice, _memory_groups
    _choice, _memory_groups = choice, tuple(memory_groups)
    return choice
