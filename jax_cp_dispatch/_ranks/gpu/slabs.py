"""Memory of GPUs that the processes of a host share, by CUDA IPC."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch._ranks import runtime


class GpuJob(NamedTuple):
    """One process of a job of one GPU each, while they connect.

    Attributes:
      publish: (name, value) -> the values of all processes.
      process: the number of this one.
      device: its GPU, as CUDA counts.
      hosts: of each process.
      slab_bytes: of each process.
    """

    publish: Callable[[str, Any], list[Any]]
    process: int
    device: int
    hosts: list[str]
    slab_bytes: int


class Slabs(NamedTuple):
    """The slabs of all processes.

    Attributes:
      transport: "cuda_ipc" or "nvshmem".
      bases: the address of each in this process; this process's own where it is not mapped.
      memory_groups: the group of each process; those of one group map each other's slabs.
    """

    transport: str
    bases: list[int]
    memory_groups: list[int]

    def reach(self, processes: Iterable[int]) -> bool:
        """Whether these processes exchange through the slabs; the same answer in all of them."""
        groups = {self.memory_groups[process] for process in processes}
        return self.transport == "nvshmem" or len(groups) <= 1


def first_reason(reasons: Sequence[str]) -> str | None:
    """Returns the first process that has a reason, with it; None if none has."""
    found = [f"process {process}: {reason}" for process, reason in enumerate(reasons) if reason]
    return found[0] if found else None


def why_patterns_are_lost(job: GpuJob, slabs: Slabs) -> str | None:
    """Tries the memory between every two processes that map it; all processes return the same.

    Some machines promise access between GPUs and lose what is written, for example because of an
    IOMMU or of ACS on the way.
    """
    ours = slabs.memory_groups[job.process]
    members = [process for process, group in enumerate(slabs.memory_groups) if group == ours]
    others = [process for process in members if process != job.process]
    place = {process: i * runtime.cuda.PATTERN_BYTES for i, process in enumerate(members)}
    pair = lambda writer, owner: writer << 16 | owner  # every pair has its own pattern

    def write(other: int) -> bool:
        address = slabs.bases[other] + place[job.process]
        return runtime.cuda.write_pattern(job.device, address, pair(job.process, other))

    def find(other: int) -> bool:
        address = slabs.bases[job.process] + place[other]
        return runtime.cuda.has_pattern(job.device, address, pair(other, job.process))

    for name, attempt in (("written", write), ("arrived", find)):
        lost = job.publish(f"{slabs.transport}_{name}", _first_lost(attempt, others))
        missing = first_reason(lost)
        if missing is not None:
            return missing
    return None


def _first_lost(attempt: Callable[[int], bool], others: Sequence[int]) -> str:
    try:
        lost = next((other for other in others if not attempt(other)), None)
    except RuntimeError as error:
        return str(error)
    if lost is None:
        return ""
    return (
        f"its GPU and that of process {lost} reach each other's memory, but data is lost (an IOMMU "
        "or ACS of the machine may be the cause)"
    )


def group_by_mapping(mapped: Sequence[Sequence[bool]]) -> list[int]:
    """Returns, for each process, the first process of its group.

    Args:
      mapped: for each process, the processes whose memory it has mapped. All processes of a group
        have mapped the same ones, so they agree on it.
    """
    return [next(q for q, other in enumerate(mapped) if other == mine) for mine in mapped]


def describe_mapping(memory_groups: Sequence[int]) -> str:
    """Describes which processes are reached through pointers, and which over the network."""
    if len(set(memory_groups)) == 1:
        return "all through pointers"
    members = [
        [p for p, i in enumerate(memory_groups) if i == first]
        for first in sorted(set(memory_groups))
    ]
    return f"{', '.join(map(_ranges, members))} through pointers, each other over the network"


def _ranges(numbers: Sequence[int]) -> str:
    """Formats [0, 1, 2, 5] as "0-2+5"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return "+".join(f"{a}-{b}" if a != b else str(a) for a, b in pairs)


def connect_ipc(job: GpuJob) -> Slabs | str:
    """Returns the slabs; or why there are none, the same in all processes."""
    memory_groups = [job.hosts.index(host) for host in job.hosts]
    if len(set(memory_groups)) == len(memory_groups):
        return "no two processes run on the same host"
    failed, address, handle = "", 0, b""
    try:
        address, handle = runtime.cuda.make_slab(job.device, job.slab_bytes)
    except RuntimeError as error:
        failed = str(error)
    handles = job.publish("ipc_handle", [failed, list(handle)])
    missing = first_reason([other for other, _ in handles])
    if missing is not None:
        if not failed:
            runtime.cuda.free_slab(job.device, address)
        return missing
    bases = [address] * len(handles)
    try:
        for other, (_, theirs) in enumerate(handles):
            if other != job.process and memory_groups[other] == memory_groups[job.process]:
                bases[other] = runtime.cuda.open_slab(job.device, bytes(theirs))
    except RuntimeError as error:
        failed = str(error)
    missing = first_reason(job.publish("ipc_slab", failed))
    slabs = Slabs("cuda_ipc", bases, memory_groups)
    missing = missing or why_patterns_are_lost(job, slabs)
    if missing is None:
        return slabs
    for base in set(bases) - {address}:
        runtime.cuda.close_slab(job.device, base)
    job.publish("ipc_closed", "")  # memory is freed after others have unmapped it
    runtime.cuda.free_slab(job.device, address)
    return missing
