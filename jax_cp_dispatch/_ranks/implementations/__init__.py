"""The implementations of exchanges and GEMMs: an object each, in a table; the choice of one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jax_cp_dispatch._ranks.communicator import Groups
from jax_cp_dispatch._ranks.implementations.cpu import IN_PROCESS, ON_CPU, SHARED_MEMORY
from jax_cp_dispatch._ranks.implementations.gpu import CUDA_IPC, CUDA_PEER, NVSHMEM, ON_GPU
from jax_cp_dispatch._ranks.implementations.implementation import (
    Implementation,
    Operation,
    all_groups,
    process_numbers,
)
from jax_cp_dispatch._ranks.job import refuse_after_fork
from jax_cp_dispatch._ranks.processes import refuse_alone
from jax_cp_dispatch._text import say_once

__all__ = [
    "CUDA_IPC",
    "CUDA_PEER",
    "IMPLEMENTATIONS",
    "IN_PROCESS",
    "NVSHMEM",
    "ON_CPU",
    "ON_GPU",
    "SHARED_MEMORY",
    "XLA",
    "Availability",
    "Implementation",
    "Operation",
    "available_implementations",
    "check_groups",
    "check_implementation",
    "choose_implementation",
    "choose_on_one_device",
    "default_platform",
    "fall_back_to_xla",
    "moves_beside_work",
    "program_platform",
    "refuse_here",
    "register_lowering",
]

XLA = Implementation(
    name="xla",
    platform=None,
    spans_processes=True,
    is_collectives=True,
    why_not=lambda platforms, groups: None,
    serves=lambda: (
        "XLA's collectives, on every platform; a rank may hold all ranks' rows, and a plan that "
        "does not fit gives NaN, not an error"
    ),
    remedy="",
    rank_attributes=lambda *_: {},  # without a custom call
)

IMPLEMENTATIONS = {row.name: row for row in (*ON_CPU, *ON_GPU, XLA)}
"""By name, preferred ones first. The last one serves every program."""


def register_lowering(
    operation: Operation, rule: Callable[..., Any], *, on: Iterable[Implementation]
) -> None:
    """Sets how implementations lower an operation.

    The package of the operation calls this, so that this one imports none of them. All rules of an
    operation take the same arguments.
    """
    for implementation in on:
        implementation.lowerings[operation] = rule


class Availability(NamedTuple):
    """Whether an implementation is available here.

    Attributes:
      available: whether `implementation=<its name>` works on the default backend, for ranks on all
        devices. It may still serve groups of ranks inside one process or host if this is false.
      reason: why it is available, or why not.
    """

    available: bool
    reason: str


def available_implementations() -> dict[str, Availability]:
    """Returns, by name (the values of `implementation=`), what is available; preferred ones first.

    Call outside `jit`; with several processes, call after `initialize`. Starts the default backend.
    """
    platforms = [default_platform()]
    reasons = {name: row.why_not(platforms, None) for name, row in IMPLEMENTATIONS.items()}
    return {
        name: Availability(reason is None, reason or IMPLEMENTATIONS[name].serves())
        for name, reason in reasons.items()
    }


def default_platform() -> str:
    """Returns the default backend by the name that programs are lowered for."""
    return program_platform(jax.default_backend())


def program_platform(name: str) -> str:
    """Returns the name that programs are lowered for, of a backend's or a device's platform."""
    return {"gpu": "cuda"}.get(name, name)


def refuse_here(op: str) -> None:
    """Rejects every call in a forked or an unconnected process. Call wherever one is traced."""
    refuse_after_fork(op)
    refuse_alone(op)


def check_implementation(op: str, wanted: str | None) -> None:
    """Rejects an unknown implementation, and every call that `refuse_here` rejects."""
    refuse_here(op)
    if wanted is not None and wanted not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation is {wanted!r}; it needs to be 'in_process', 'shared_memory' "
            f"or 'xla', on GPUs {', '.join(repr(row.name) for row in ON_GPU)}, or None. See "
            "available_implementations()."
        )


def choose_implementation(
    op: str, wanted: str | None, platforms: Sequence[str], groups: Groups | None = None
) -> Implementation:
    """Returns the implementation for a program lowered for `platforms`, the same in all processes.

    Args:
      op: the public operation, for error messages.
      wanted: the caller's choice, checked; None selects the first that can serve the program.
      groups: the devices of the ranks, by group; None if all devices form one group.
    Raises:
      NotImplementedError: `wanted` cannot serve these platforms or groups.
    """
    if wanted is not None:
        refuse_if_unable(op, IMPLEMENTATIONS[wanted], platforms, groups)
        return IMPLEMENTATIONS[wanted]
    row = next(r for r in IMPLEMENTATIONS.values() if r.why_not(platforms, groups) is None)
    if row is XLA:
        why = _likeliest(platforms, groups).why_not(platforms, groups)
        say_once(f"moves rows with XLA's collectives (implementation='xla'): {why}.")
    return row


def _likeliest(platforms: Sequence[str], groups: Groups | None) -> Implementation:
    """Returns the transport whose reason says most: that for as many processes as a group has."""
    rows = ON_GPU if set(platforms) == {"cuda"} else ON_CPU
    spans_processes = any(len(process_numbers(group)) > 1 for group in all_groups(groups))
    return next(row for row in rows if row.spans_processes == spans_processes)


def choose_on_one_device(
    op: str, wanted: str | None, platforms: Sequence[str], num_ranks: int
) -> Implementation:
    """Returns the implementation of an exchange if one device holds the rows of all ranks."""
    row = None if wanted is None else IMPLEMENTATIONS[wanted]
    if set(platforms) == {"cuda"} and (row is None or row.platform == "cuda"):
        here = (jax.local_devices()[0],) * num_ranks
        return choose_implementation(op, wanted, platforms, (here,))
    return XLA


def moves_beside_work(wanted: str | None) -> bool:
    """Whether a call in two parts moves rows beside the program, as far as it is known here.

    Programs are traced before it is known what they are lowered for. This is the implementation of
    programs for the default backend, unless the caller named one.
    """
    row = IMPLEMENTATIONS.get(wanted or "")
    if row is None:
        platforms = [default_platform()]
        row = next(r for r in IMPLEMENTATIONS.values() if r.why_not(platforms, None) is None)
    return Operation.EXCHANGE_START in row.lowerings


def check_groups(op: str, wanted: str | None, groups: Groups | None) -> None:
    """Rejects, before lowering, a transport between CPU devices that does not reach all ranks.

    Raises:
      NotImplementedError: `wanted` cannot serve groups of these devices.
    """
    if groups is None or wanted is None or IMPLEMENTATIONS[wanted].platform != "cpu":
        return
    refuse_if_unable(op, IMPLEMENTATIONS[wanted], ["cpu"], groups)


def refuse_if_unable(
    op: str, row: Implementation, platforms: Sequence[str], groups: Groups | None
) -> None:
    """Raises the reason if an implementation that the caller named cannot serve a program."""
    missing = row.why_not(platforms, groups)
    if missing is not None:
        raise NotImplementedError(_refusal(op, row, missing))


def fall_back_to_xla(op: str, wanted: str | None, missing: str) -> Implementation:
    """Returns XLA where the kernels of a GPU transport do not support a call; logs this once.

    Raises:
      NotImplementedError: the caller asked for the transport by name.
    """
    if wanted is not None:
        raise NotImplementedError(_refusal(op, IMPLEMENTATIONS[wanted], missing))
    say_once(f"{op}: XLA serves this call (implementation='xla'): {missing}.")
    return XLA


def _refusal(op: str, row: Implementation, missing: str) -> str:
    return f"{op}: implementation={row.name!r} cannot serve this program: {missing}. {row.remedy}"
