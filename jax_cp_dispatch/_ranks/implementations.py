"""The implementations of exchanges and GEMMs: an object each, in a table; the choice of one."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator, Groups, call_site_attributes
from jax_cp_dispatch._ranks.gpu import (
    connected_gpus,
    connected_slabs,
    gpu_attributes,
    gpus_here,
    why_gpus_do_not_meet,
    why_no_kernels,
    window_attributes,
)
from jax_cp_dispatch._ranks.job import refuse_here
from jax_cp_dispatch._ranks.processes import share_memory, transport_choice
from jax_cp_dispatch._text import say_once

# ---- One implementation of the operations: what it serves, and how it lowers each of them.


class Operation(enum.Enum):
    EXCHANGE = "dispatch and combine"
    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Implementation:
    name: str  # the value of `implementation=`
    platform: str | None  # the platform whose devices it serves; None: all
    # Whether ranks of one group may be in several processes; None: in any number
    spans_processes: bool | None
    # From the devices of the ranks, in as many processes as it serves, why it does not reach all of
    # them, or None
    why_unreached: Callable[[Groups], str | None] = lambda groups: None
    serves: Callable[[], str]  # what it serves, as text, if it is available
    remedy: str  # the next step, for the error if it cannot serve a program
    # From the context of a lowering rule, the ranks, their devices and a description of the
    # operation, the attributes by which a custom call finds its ranks. They replace those of the
    # operation.
    rank_attributes: Callable[[Any, Communicator, Groups | None, str], dict[str, Any]]
    # The rule of each operation; see `register_lowering`
    lowerings: dict[Operation, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def why_not(self, platforms: Sequence[str], groups: Groups | None) -> str | None:
        """Returns why it cannot serve a program for `platforms`, or None.

        `groups` are the devices of the ranks; None: all devices form one group. A program can be
        lowered for GPUs without one, so this does not look for GPUs.
        """
        if self.platform is None:
            return None
        other = [name for name in platforms if name != self.platform]
        if other:
            devices = "CPU devices" if self.platform == "cpu" else "NVIDIA GPUs"
            return f"the platform is {other[0]!r}, but it serves {devices}"
        if self.platform == "cuda" and runtime.cuda is None:
            return runtime.cuda_reason
        if self.spans_processes and jax.process_count() == 1:
            return "there is one process"
        groups = (tuple(jax.devices()),) if groups is None else groups
        for group in groups if self.spans_processes is False and jax.process_count() > 1 else ():
            processes = process_numbers(group)
            if len(processes) > 1:
                named = ", ".join(map(str, processes[:4])) + (", ..." if len(processes) > 4 else "")
                return (
                    f"ranks of one group are in {len(processes)} processes ({named}), but it "
                    "serves those of one"
                )
        return self.why_unreached(groups)

    def refuse(self, op: str, missing: str) -> NoReturn:
        """Raises, for a program that the caller wants it to serve, the reason why it cannot."""
        raise NotImplementedError(
            f"{op}: implementation={self.name!r} cannot serve this program: {missing}. "
            f"{self.remedy}"
        )


def process_numbers(group: Iterable[Any]) -> list[int]:
    return sorted({device.process_index for device in group})


# ---- Between CPU devices: inside one process, and between the processes of one host.

_CPU_REMEDY = (
    "Pass implementation='xla', or run on CPU devices with JAX_PLATFORMS=cpu: for virtual devices "
    "of one process, set jax.config.update('jax_num_cpu_devices', n); for several processes of one "
    "host, call jax_cp_dispatch.initialize()."
)


def _why_not_shared(groups: Groups) -> str | None:
    choice = transport_choice()
    if choice is None:
        return "jax_cp_dispatch.initialize() has not been called in this process"
    return None if all(map(share_memory, map(process_numbers, groups))) else choice.reason


IN_PROCESS = Implementation(
    name="in_process",
    platform="cpu",
    spans_processes=False,
    serves=lambda: "all devices are CPU devices of this process",
    remedy=_CPU_REMEDY,
    rank_attributes=functools.partial(call_site_attributes, "in_process"),
)

SHARED_MEMORY = Implementation(
    name="shared_memory",
    platform="cpu",
    spans_processes=True,
    why_unreached=_why_not_shared,
    serves=lambda: getattr(transport_choice(), "reason", ""),
    remedy=_CPU_REMEDY,
    rank_attributes=functools.partial(call_site_attributes, "shared_memory"),
)

ON_CPU = (IN_PROCESS, SHARED_MEMORY)


# ---- Between NVIDIA GPUs: of this process, and of several with one GPU each.

MAX_RANKS = 64
"""As in csrc/kernels/call.h: ranks are bits of a word."""


def _why_too_many(groups: Groups) -> str | None:
    most = max(map(len, groups), default=0)
    if most <= MAX_RANKS:
        return None
    return f"there are {most} ranks, but a call on GPUs takes at most {MAX_RANKS}"


def _why_not_connected(name: str, groups: Groups) -> str | None:
    world, slabs = connected_gpus(), connected_slabs()
    if world is None:
        return "jax_cp_dispatch.gpu.connect_gpus() has not been called in this process"
    if slabs is not None and slabs.transport != name:
        return f"{slabs.transport} connects the processes: {world.reason}"
    if slabs is None or not all(map(slabs.reach, map(process_numbers, groups))):
        return world.reason
    return _why_too_many(groups)


_REMEDY = "Pass implementation='xla'."

CUDA_PEER = Implementation(
    name="cuda_peer",
    platform="cuda",
    spans_processes=False,
    why_unreached=lambda groups: _why_too_many(groups) or why_gpus_do_not_meet(groups),
    serves=lambda: "the GPUs of this process reach each other's memory",
    remedy=_REMEDY,
    rank_attributes=functools.partial(gpu_attributes, "devices"),
)

NVSHMEM = Implementation(
    name="nvshmem",
    platform="cuda",
    spans_processes=True,
    why_unreached=functools.partial(_why_not_connected, "nvshmem"),
    serves=lambda: "one process per GPU, over NVSHMEM: through pointers, or over the network",
    remedy=_REMEDY,
    rank_attributes=functools.partial(gpu_attributes, "slab"),
)

CUDA_IPC = Implementation(
    name="cuda_ipc",
    platform="cuda",
    spans_processes=True,
    why_unreached=functools.partial(_why_not_connected, "cuda_ipc"),
    serves=lambda: "one process per GPU of one host, whose memory CUDA maps into all of them",
    remedy=_REMEDY,
    rank_attributes=functools.partial(gpu_attributes, "slab"),
)

ON_GPU = (CUDA_PEER, NVSHMEM, CUDA_IPC)


# ---- The same, through windows of NCCL on XLA's communicator. Has not run on a GPU.


def _why_no_window(groups: Groups) -> str | None:
    if why := runtime.why_no_communicators():
        return why
    return runtime.why_no_nccl() or _why_too_many(groups) or why_no_kernels(gpus_here()) or None


NCCL_WINDOW = Implementation(
    name="nccl_window",
    platform="cuda",
    spans_processes=None,
    why_unreached=_why_no_window,
    serves=lambda: "exchanges between GPUs that NVLink connects; not yet run on a GPU",
    remedy="Pass another implementation, such as 'xla'.",
    rank_attributes=window_attributes,
)


XLA = Implementation(
    name="xla",
    platform=None,
    spans_processes=True,
    serves=lambda: (
        "XLA's collectives, on every platform; a rank may hold all ranks' rows, and a plan that "
        "does not fit gives NaN, not an error"
    ),
    remedy="",
    rank_attributes=lambda *_: {},  # without a custom call
)

IMPLEMENTATIONS = {row.name: row for row in (*ON_CPU, *ON_GPU, XLA, NCCL_WINDOW)}
"""By name, preferred ones first. XLA serves every program: behind it is what has not yet run."""


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

    Without `implementation=`, programs over all devices use the first one that is available. Call
    outside `jit`; with several processes, call after `initialize`. Starts the default backend.
    """
    platforms = [program_platform()]
    reasons = {name: row.why_not(platforms, None) for name, row in IMPLEMENTATIONS.items()}
    return {
        name: Availability(reason is None, reason or IMPLEMENTATIONS[name].serves())
        for name, reason in reasons.items()
    }


def program_platform(name: str | None = None) -> str:
    """Returns the name that programs are lowered for, of a backend's or a device's platform.

    None is the default backend.
    """
    name = name or jax.default_backend()
    return {"gpu": "cuda"}.get(name, name)


def check_implementation(op: str, wanted: Any) -> None:
    """Rejects an unknown implementation, and every call that `refuse_here` rejects."""
    refuse_here(op)
    if wanted is not None and wanted not in IMPLEMENTATIONS:
        on_gpus = ", ".join(repr(row.name) for row in (*ON_GPU, NCCL_WINDOW))
        raise ValueError(
            f"{op}: implementation is {wanted!r}; it needs to be 'in_process', 'shared_memory' "
            f"or 'xla', on GPUs {on_gpus}, or None. See available_implementations()."
        )


def choose_implementation(
    op: str, wanted: str | None, platforms: Sequence[str], groups: Groups | None = None
) -> Implementation:
    """Returns the implementation for a program lowered for `platforms`, the same in all processes.

    `wanted` is the caller's choice, checked; None selects the first that can serve the program.
    `groups` are the devices of the ranks; None if all devices form one group.
    """
    if wanted is not None:
        row = IMPLEMENTATIONS[wanted]
        if missing := row.why_not(platforms, groups):
            row.refuse(op, missing)
        return row
    rows = IMPLEMENTATIONS.values()
    row = next(r for r in rows if r.why_not(platforms, groups) is None)
    if row is XLA:
        # The reason that says most is that of a transport for as many processes as a group has.
        rows = ON_GPU if set(platforms) == {"cuda"} else ON_CPU
        found = [jax.devices()] if groups is None else groups
        spans = any(len(process_numbers(group)) > 1 for group in found)
        likeliest = next(row for row in rows if row.spans_processes == spans)
        why = likeliest.why_not(platforms, groups)
        say_once(f"moves rows with XLA's collectives (implementation='xla'): {why}.")
    return row


def moves_beside_work(wanted: str | None) -> bool:
    """Whether a call in two parts moves rows beside the program, as far as it is known here.

    Programs are traced before it is known what they are lowered for. This is the implementation of
    programs for the default backend, unless the caller named one.
    """
    row = IMPLEMENTATIONS.get(wanted or "")
    if row is None:
        platforms = [program_platform()]
        rows = IMPLEMENTATIONS.values()
        row = next(r for r in rows if r.why_not(platforms, None) is None)
    return row in ON_GPU
