"""Stores what `initialize` chose in this process."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


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
_islands: tuple[int, ...] = ()


def transport_choice() -> TransportChoice | None:
    """Returns the choice of `initialize`, or None before that call."""
    return _choice


def share_memory(processes: Iterable[int]) -> bool:
    """Whether these processes exchange through shared memory; the same answer in all of them."""
    return bool(_islands) and len({_islands[process] for process in processes}) <= 1


def remember(choice: TransportChoice, islands: Sequence[int] = ()) -> TransportChoice:
    """Stores `choice` for `transport_choice`.

    Args:
      islands: a number per process; processes with equal numbers share memory. Empty: none do.
    """
    global _choice, _islands
    _choice, _islands = choice, tuple(islands)
    return choice
