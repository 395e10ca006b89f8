"""What `initialize` chose in this process, for those who ask later."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class TransportChoice(NamedTuple):
    """The transport between the processes of a job, and why.

    Attributes:
      implementation: of ranks on all devices: "shared_memory", on GPUs "nvshmem" or "cuda_ipc",
        "xla" (no transport of this package reaches all of them), or "in_process" (there is one
        process).
      reason: why this one, for people.
    """

    implementation: str
    reason: str


_choice: TransportChoice | None = None
_islands: tuple[int, ...] = ()


def transport_choice() -> TransportChoice | None:
    """What `initialize` chose; None before it has been called."""
    return _choice


def share_memory(processes: Iterable[int]) -> bool:
    """Whether these processes of the job exchange through shared memory. The same answer in all."""
    return bool(_islands) and len({_islands[process] for process in processes}) <= 1


def remember(choice: TransportChoice, islands: Sequence[int] = ()) -> TransportChoice:
    """Makes `choice` what `transport_choice` returns.

    Args:
      islands: a number for each process; those with equal ones share memory. None do without it.
    """
    global _choice, _islands
    _choice, _islands = choice, tuple(islands)
    return choice
