"""What `initialize` chose in this process, for those who ask later."""

from typing import NamedTuple


class TransportChoice(NamedTuple):
    """The transport between the processes of a job, and why.

    Attributes:
      implementation: "shared_memory", on GPUs "nvshmem" or "cuda_ipc", "xla" (no transport of this
        package reaches all of them), or "in_process" (there is one process).
      reason: why this one, for people.
    """

    implementation: str
    reason: str


_choice: TransportChoice | None = None


def transport_choice() -> TransportChoice | None:
    """What `initialize` chose; None before it has been called."""
    return _choice


def remember(choice: TransportChoice) -> TransportChoice:
    """Makes `choice` what `transport_choice` returns."""
    global _choice
    _choice = choice
    return choice
