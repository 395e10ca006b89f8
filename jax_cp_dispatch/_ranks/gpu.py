"""Connects the GPUs of several processes, and says how programs over all of them exchange."""

import functools
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import (
    Communicator,
    Groups,
    call_site,
    deadline_ms,
    mesh_groups,
)
from jax_cp_dispatch._ranks.gpu_waits import first_calls, start_watch
from jax_cp_dispatch._ranks.job import publish, publish_and_read_all, read_from
from jax_cp_dispatch._ranks.nvshmem_trial import why_nvshmem_ends

# ---- Memory of GPUs that the processes of a host share, by CUDA IPC.


class GpuJob(NamedTuple):
    """One process of a job of one GPU each, while they connect."""

    publish: Callable[[str, Any], list[Any]]  # (name, value) -> the values of all processes
    process: int
    device: int  # its GPU, as CUDA counts
    hosts: list[str]  # of each process
    slab_bytes: int  # of each process


class Slabs(NamedTuple):
    """The slabs of all processes."""

    transport: str  # "cuda_ipc" or "nvshmem"
    bases: list[int]  # the address of each here; this process's own where it is not mapped
    memory_groups: list[int]  # of each process; those of one group map each other's slabs
    fixed_bytes: int = 0  # of a slab that cannot grow
    network: str = ""  # by which groups reach each other, in words

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
        reason = ""
        try:
            lost = [other for other in others if not attempt(other)]
        except RuntimeError as error:
            lost, reason = [], str(error)
        if lost:
            reason = (
                f"its GPU and that of process {lost[0]} reach each other's memory, but data is "
                "lost (an IOMMU or ACS of the machine may be the cause)"
            )
        missing = first_reason(job.publish(f"{slabs.transport}_{name}", reason))
        if missing is not None:
            return missing
    return None


def group_by_mapping(mapped: Sequence[Sequence[bool]]) -> list[int]:
    """Returns, for each process, the first process of its group.

    `mapped` says for each process whose memory it has mapped. All processes of a group have mapped
    the same ones, so they agree on it.
    """
    return [next(q for q, other in enumerate(mapped) if other == mine) for mine in mapped]


def describe_mapping(memory_groups: Sequence[int]) -> str:
    """Says who is reached through pointers, and who over the network; 0-2+5 are one group."""
    if len(set(memory_groups)) == 1:
        return "all through pointers"
    members = []
    for first in sorted(set(memory_groups)):
        own = [p for p, group in enumerate(memory_groups) if group == first]
        starts, ends = ([p for p in own if p + step not in own] for step in (-1, 1))
        runs = zip(starts, ends, strict=True)
        members.append("+".join(f"{a}-{b}" if a != b else str(a) for a, b in runs))
    return f"{', '.join(members)} through pointers, each other over the network"


def connect_ipc(job: GpuJob) -> Slabs | str:
    """Returns the slabs; or why there are none, the same in all processes."""
    memory_groups = [job.hosts.index(host) for host in job.hosts]
    if len(set(memory_groups)) == len(memory_groups):
        return "no two processes run on the same host"
    failed, address, handle = "", 0, ""
    try:
        address, handle = runtime.cuda.make_slab(job.device, job.slab_bytes)
    except RuntimeError as error:
        failed = str(error)
    handles = job.publish("ipc_handle", [failed, handle])
    missing = first_reason([other for other, _ in handles])
    if missing is not None:
        if not failed:
            runtime.cuda.end_slab(job.device, address, is_own=True)
        return missing
    bases = [address] * len(handles)
    try:
        for other, (_, theirs) in enumerate(handles):
            if other != job.process and memory_groups[other] == memory_groups[job.process]:
                bases[other] = runtime.cuda.open_slab(job.device, theirs)
    except RuntimeError as error:
        failed = str(error)
    missing = first_reason(job.publish("ipc_slab", failed))
    slabs = Slabs("cuda_ipc", bases, memory_groups)
    missing = missing or why_patterns_are_lost(job, slabs)
    if missing is None:
        return slabs
    for base in set(bases) - {address}:
        runtime.cuda.end_slab(job.device, base, is_own=False)
    job.publish("ipc_closed", "")  # memory is freed after others have unmapped it
    runtime.cuda.end_slab(job.device, address, is_own=True)
    return missing


# ---- Connects processes through NVSHMEM, which is tried in child processes first: it may end them.

_POINTERS_VARIABLE = "JAX_CP_DISPATCH_GPU_POINTERS"
_OWN_BYTES = 64 << 20  # of the heap, beside the slab: NVSHMEM's own data


def connect_nvshmem(job: GpuJob, is_named: bool) -> Slabs | str:
    """Returns the slabs; or why there are none, the same in all processes.

    If the user named NVSHMEM, it is started without a trial.
    """
    module, why = runtime.load_nvshmem()
    for name, value in (("NVSHMEM_DISABLE_NCCL", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
        os.environ.setdefault(name, value)
    version = module.version() if module else ""
    facts = job.publish("nvshmem", [why, version, is_named or may_network(), describe_network()])
    missing = first_reason([fact[0] for fact in facts])
    if missing is not None:
        return missing
    if module is None or any(fact[1] != version for fact in facts):
        return f"the versions of NVSHMEM differ: {[fact[1] for fact in facts]}"
    hosts = [(host, fact[2]) for host, fact in zip(job.hosts, facts, strict=True)]
    missing = what_hosts_lack(hosts)
    if missing is not None:
        return missing
    found: Slabs | str = ""
    if not is_named:
        found = why_nvshmem_ends(job, module.__file__, runtime.nvshmem_library())
    if not found:
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(job.slab_bytes + _OWN_BYTES))
        found = _start(job, module)
    first = {fact[3]: p for p, fact in reversed(list(enumerate(facts)))}  # of alike processes
    ordered = sorted((p, network) for network, p in first.items())
    network = "; ".join(
        f"network{f' of process {p}' * (len(ordered) > 1)}: {network}" for p, network in ordered
    )
    if isinstance(found, Slabs):
        return found._replace(network=network)
    return found if len(set(job.hosts)) == 1 else f"{found}; {network}"


def may_network() -> bool:
    """Whether NVSHMEM may find a network here. If it needs one and finds none, it exits."""
    adapters = pathlib.Path("/sys/class/infiniband")
    is_named = "NVSHMEM_REMOTE_TRANSPORT" in os.environ
    return is_named or (adapters.is_dir() and any(adapters.iterdir()))


_NETWORK_VARIABLES = (
    *("NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING"),
    *("NVSHMEM_ENABLE_NIC_PE_MAPPING", "NVSHMEM_IBGDA_NIC_HANDLER"),
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
)


def describe_network(root: pathlib.Path = pathlib.Path("/")) -> str:
    """Says what decides how fast NVSHMEM moves rows between hosts: adapters, IBGDA, the driver."""

    def read(*path: Any) -> str:
        try:
            return root.joinpath(*path).read_text().strip()
        except OSError:  # such a file may be absent, or without a value
            return ""

    adapters = []
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        state, layer, rate = (read(port, name) for name in ("state", "link_layer", "rate"))
        link = f"{layer}, {rate}" if "ACTIVE" in state else state
        adapters.append(f"{port.parents[1].name}:{port.name} ({link})")
    parts = [f"adapters {', '.join(adapters)}" if adapters else "no InfiniBand adapter"]
    if os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "").lower() in ("1", "true", "yes", "y", "on"):
        is_set = "PeerMappingOverride=1" in read("proc/driver/nvidia/params")
        parts += [f"IBGDA on, the driver has {'' if is_set else 'no '}PeerMappingOverride=1"]
    else:
        parts += ["IBGDA off: one thread of the host starts all transfers of a process"]
    has_module = (root / "sys/module/nvidia_peermem").exists()
    parts += ["nvidia_peermem loaded" if has_module else "no nvidia_peermem, so dmabuf is needed"]
    given = {name: os.environ[name] for name in _NETWORK_VARIABLES if name in os.environ}
    return ", ".join([*parts, *(f"{name}={value}" for name, value in given.items())])


def what_hosts_lack(hosts: list[tuple[str, bool]]) -> str | None:
    """Returns which process of several hosts has no network for NVSHMEM; None if all may start it.

    `hosts` are, for each process, its host and whether NVSHMEM may find a network there.
    """
    if len({host for host, _ in hosts}) == 1 or all(found for _, found in hosts):
        return None
    process, (host, _) = next((p, h) for p, h in enumerate(hosts) if not h[1])
    return (
        f"process {process} of several hosts, on {host}, has no InfiniBand adapter "
        "(/sys/class/infiniband); if another network or NVLink connects the hosts, set "
        "NVSHMEM_REMOTE_TRANSPORT or JAX_CP_DISPATCH_GPU_TRANSPORT=nvshmem"
    )


def _start(job: GpuJob, module: Any) -> Slabs | str:
    process, num_processes = job.process, len(job.hosts)
    try:
        first = list(module.unique_id()) if process == 0 else []
        unique_id = bytes(job.publish("unique_id", first)[0])
        module.start(process, num_processes, unique_id, job.device)
        bases, failed = module.make_slab(job.slab_bytes), ""
    except RuntimeError as error:
        bases, failed = [], str(error)
    if bases and not all(bases) and os.environ.get("NVSHMEM_REMOTE_TRANSPORT") == "none":
        failed = (
            f"cannot map the memory of process {bases.index(0)} (no NVLink or PCIe between them), "
            "and NVSHMEM_REMOTE_TRANSPORT is none"
        )
    uses_pointers = os.environ.get(_POINTERS_VARIABLE, "1") != "0"
    mapped = [p == process or (uses_pointers and base != 0) for p, base in enumerate(bases)]
    found = job.publish("nvshmem_slab", [failed, mapped])
    missing = first_reason([reason for reason, _ in found])
    if missing is not None:
        return missing
    memory_groups = group_by_mapping([mapped for _, mapped in found])
    # To name memory of another process, NVSHMEM expects this process's address of its own slab.
    bases = [
        base if memory_groups[p] == memory_groups[process] else bases[process]
        for p, base in enumerate(bases)
    ]
    if len(set(memory_groups)) > 1:
        failed = ""
        try:
            runtime.cuda.set_network_launcher(module.launcher(job.device))
        except RuntimeError as error:
            failed = str(error)
        missing = first_reason(job.publish("nvshmem_launcher", failed))
    slabs = Slabs("nvshmem", bases, memory_groups, job.slab_bytes)
    return missing or why_patterns_are_lost(job, slabs) or slabs


_SLAB_BYTES = 1 << 30
_SLAB_VARIABLE = "JAX_CP_DISPATCH_SYMMETRIC_BYTES"
_TRANSPORT_VARIABLE = "JAX_CP_DISPATCH_GPU_TRANSPORT"


class GpuWorld(NamedTuple):
    """The implementation for programs over the GPUs of several processes.

    Attributes:
      implementation: "nvshmem", "cuda_ipc", "cuda_peer" for one process, or "xla".
      reason: why it was chosen.
    """

    implementation: str
    reason: str


_world: GpuWorld | None = None
_slabs: Slabs | None = None


def connected_gpus() -> GpuWorld | None:
    """Returns the choice of `connect_gpus`, or None before that call."""
    return _world


def connected_slabs() -> Slabs | None:
    """Returns the memory of the processes; None if they have not connected, or could not."""
    return _slabs


def connect_gpus(*, timeout: float = 120.0) -> GpuWorld:
    """Connects this process's GPU to the GPUs of the other processes of the job.

    Call in every process, after `jax.distributed.initialize` and before a program is compiled.
    Processes of one host use CUDA IPC, or else NVSHMEM. Processes of several hosts use NVSHMEM, or
    else CUDA IPC for groups of ranks inside a host. Otherwise XLA's collectives serve. NVSHMEM is
    first started in a child of each process, since it ends a process in which it fails. Set
    `JAX_CP_DISPATCH_GPU_TRANSPORT` to nvshmem or cuda_ipc to use only that one, without this trial.
    If hosts reach each other by NVSHMEM, the reason has their network adapters and its settings.

    With NVSHMEM, a GPU uses pointers to memory that it can map, and the network to reach other
    hosts. `JAX_CP_DISPATCH_GPU_POINTERS=0` makes it use the network for all others. Every process
    reserves `JAX_CP_DISPATCH_SYMMETRIC_BYTES` of its GPU's memory (default 1 GiB). With CUDA IPC,
    it takes more when a program needs more.

    Args:
      timeout: seconds to wait for each of the other processes.
    Returns:
      The choice, the same in all processes, and the reason.
    Raises:
      RuntimeError: another process did not join.
      ValueError: an environment variable is invalid.
    """
    global _world, _slabs
    if _world is not None and _world.implementation != "cuda_peer":
        return _world
    if jax.process_count() == 1:
        _world = GpuWorld("cuda_peer", "there is one process")
        return _world
    wanted = os.environ.get(_TRANSPORT_VARIABLE)
    if wanted not in (None, "nvshmem", "cuda_ipc"):
        raise ValueError(
            f"connect_gpus: {_TRANSPORT_VARIABLE} is {wanted!r}; "
            "it needs to be nvshmem or cuda_ipc."
        )
    publish_all = partial(publish_and_read_all, "connect_gpus", timeout=timeout)
    _world, _slabs = _connect(publish_all, wanted)
    return _world


def _connect(publish_all: Any, wanted: str | None) -> tuple[GpuWorld, Slabs | None]:
    text = os.environ.get(_SLAB_VARIABLE, str(_SLAB_BYTES))
    if not text.isdecimal() or int(text) < 1 << 20:
        raise ValueError(f"connect_gpus: {_SLAB_VARIABLE} is {text!r}; it needs at least 1048576.")
    why = runtime.cuda_reason
    device = _local_gpus()[0].local_hardware_id or 0
    if runtime.cuda is not None:
        num_gpus, reason = runtime.cuda.device_count()
        why = why_no_kernels([device]) if num_gpus else f"this process has no GPU: {reason}"
    found = publish_all("ready", [why, len(_local_gpus()), _host(), int(text)])
    reasons = [f"process {p}: {why}" for p, (why, *_) in enumerate(found) if why]
    if not reasons and max(num_gpus for _, num_gpus, *_ in found) > 1:
        p, num_gpus = next((p, one[1]) for p, one in enumerate(found) if one[1] > 1)
        reasons.append(
            f"process {p} has {num_gpus} GPUs, but processes connect with one each; groups of "
            "ranks inside one process use cuda_peer"
        )
    sizes = [one[3] for one in found]
    if len(set(sizes)) > 1:
        reasons.append(f"{_SLAB_VARIABLE} differs between the processes: {sizes}")
    if reasons:
        return GpuWorld("xla", "; ".join(reasons)), None
    hosts = [one[2] for one in found]
    job = GpuJob(publish_all, jax.process_index(), device, hosts, sizes[0])
    ways = {"cuda_ipc": connect_ipc, "nvshmem": partial(connect_nvshmem, is_named=bool(wanted))}
    num_hosts = len(set(hosts))
    for name in sorted(ways, reverse=num_hosts > 1):  # the better one first
        if wanted in (None, name):
            slabs = ways[name](job)
            if isinstance(slabs, Slabs):
                # The processes allocate channels from these together.
                cuda: Any = runtime.cuda
                cuda.set_slab(slabs.bases, job.slab_bytes, slabs.memory_groups, job.process)
                cuda.set_agree(_agree)
                if not slabs.fixed_bytes:
                    cuda.let_slab_grow(job.device)
                return _describe(slabs, num_hosts, reasons), slabs
            reasons.append(f"{name}: {slabs}")
    return GpuWorld("xla", "; ".join(reasons)), None


def _agree(
    name: str, message: str, processes: list[int], milliseconds: int
) -> tuple[list[str], str]:
    """Publishes a message; returns those of `processes` in their order, and an error or ""."""
    end = time.monotonic() + milliseconds / 1000
    found: dict[int, str] = {}
    publish("channel", name, message, may_repeat=True)
    try:
        for process in sorted(set(processes)):
            first_calls[name] = process
            left = max(0.001, end - time.monotonic())
            found[process] = read_from("channel", name, process, left)
    except RuntimeError:
        missing, seconds = first_calls[name], milliseconds / 1000
        return [], (
            f"process {missing} did not come to this call within {seconds:g} s, three deadlines, "
            "which a first call has. It runs another program, has ended, or is slower; pass a "
            "longer deadline."
        )
    finally:
        first_calls.pop(name, None)
    return [found[process] for process in processes], ""


def _describe(slabs: Slabs, num_hosts: int, reasons: list[str]) -> GpuWorld:
    num_processes = len(slabs.bases)
    where = f"{num_processes} processes of {num_hosts} host{'s' * (num_hosts > 1)}, one GPU each"
    if slabs.reach(range(num_processes)):
        if len(set(slabs.memory_groups)) > 1:
            where += f": {describe_mapping(slabs.memory_groups)}; {slabs.network}"
        return GpuWorld(slabs.transport, "; ".join([where, *reasons]))
    inside = f"groups of ranks inside one host use {slabs.transport}"
    return GpuWorld("xla", "; ".join([where, *reasons, inside]))


def _local_gpus() -> list[Any]:
    return jax.local_devices()


def _host() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


# ---- The GPUs of a program's ranks: their numbers and memory, and the table for custom calls.

_OP = "peer_access"


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


def device_entry(device: Any) -> int:
    """Encodes a process and its device in one number, which csrc/cuda/memory.h decodes."""
    return device.process_index << 16 | number_in_process(device)


def local_ordinals() -> list[int]:
    """Returns how CUDA numbers the devices of this process, in their order."""
    own = jax.process_index()
    ordinals = [(n, d) for d, n in _numbers().items() if d.process_index == own]  # in order
    return [n if d.local_hardware_id is None else d.local_hardware_id for n, d in ordinals]


def why_no_kernels(ordinals: Iterable[int]) -> str:
    """Returns why one of these GPUs, as CUDA counts, cannot run the package's kernels, or ""."""
    for ordinal in ordinals:
        if why := runtime.cuda.why_no_kernels(ordinal):
            number = compute_capability()
            return (
                f"{why} (its compute capability is {number / 10}; build the package with "
                f"CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES={number})"
            )
    return ""


def compute_capability() -> int:
    """Returns the least of this process's GPUs: 90 is 9.0; 0 if none is here."""
    found = [getattr(device, "compute_capability", None) for device in jax.local_devices()]
    return min(round(10 * float(one or 0)) for one in found)


def gpus_here() -> list[int]:
    """Returns CUDA's numbers of this process's GPUs; none if the program is for another machine."""
    ordinals = local_ordinals() if runtime.cuda else []
    return ordinals if ordinals and max(ordinals) < runtime.cuda.device_count()[0] else []


def why_gpus_do_not_meet(groups: Groups) -> str | None:
    """Returns why GPUs of one group cannot exchange; None if all can.

    Each group lies in one process. A process tries its own GPUs, once, and tells the other
    processes of the program, so that all of them lower it alike.
    """
    own = jax.process_index()
    numbers_of = lambda group: tuple(sorted(set(map(number_in_process, group))))
    sets = {(group[0].process_index, numbers_of(group)) for group in groups if group}
    sets = sorted(found for found in sets if len(found[1]) > 1 or found[0] == own)
    for process, numbers in sets:
        if process == own:
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
        start_watch()
        seconds = deadline_ms(None, on_gpus=True) / 1000  # it may still compile other programs
        first_calls[name] = process
        try:
            return read_from(_OP, name, process, seconds)
        except RuntimeError as error:  # not a reason for XLA: that process may choose otherwise
            raise RuntimeError(
                f"process {process} has not lowered this program within {seconds:g} s, so it is "
                "unknown whether its GPUs reach each other's memory. Every process lowers the same "
                "programs; check whether that one raised its own error."
            ) from error
        finally:
            first_calls.pop(name, None)
    reason, ordinals = "", gpus_here()
    if numbers[-1] < len(ordinals):
        used = [ordinals[number] for number in numbers]
        reason = why_no_kernels(used)
        if not reason and len(used) > 1:
            reason = runtime.cuda.connect_peers(used)
    if jax.process_count() > 1 and len(numbers) > 1:
        publish(_OP, name, reason)
    return reason


class _Channels(dict[Any, int]):
    """The channels of the program that is being lowered: what each depends on, and its bytes."""


def why_slab_is_full(module_context: Any, key: Any, num_bytes: int) -> str | None:
    """Returns why a channel does not fit the slabs beside the others of its program, or None.

    All processes lower a program alike, but maybe not the same programs: those before do not count.
    """
    slabs = connected_slabs()
    if slabs is None or slabs.fixed_bytes == 0:
        return None
    channels = next((x for x in module_context.keepalives if isinstance(x, _Channels)), None)
    if channels is None:
        channels = _Channels()
        module_context.add_keepalive(channels)
    needed = sum({**channels, key: num_bytes}.values())
    if needed > slabs.fixed_bytes:
        return (
            f"the channels of this program need {needed} bytes of each process or more, but it has "
            f"{slabs.fixed_bytes} ({_SLAB_VARIABLE})"
        )
    channels[key] = num_bytes
    return None


def gpu_attributes(
    memory: str, ctx: Any, comm: Communicator, groups: Groups | None, what: str
) -> dict[str, Any]:
    """Returns the attributes of the custom call of one rank that tell of all ranks.

    `memory` is where the ranks meet: "devices" of this process, or a "slab" per process. Without
    axes one device holds everything.
    """
    if not comm.axis_names:
        return all_ranks_here()
    if runtime.cuda is not None:
        runtime.cuda.set_process(jax.process_index(), local_ordinals())
        start_watch()
    devices = [device for group in groups or _first_devices(ctx, comm) for device in group]
    return {
        "device_table": np.array([device_entry(d) for d in devices], np.int64),
        "memory": memory,
        "site": np.int64(call_site(ctx, comm)),
        "deadline_ms": np.int64(deadline_ms(comm.deadline, on_gpus=True)),
    }


def window_attributes(
    ctx: Any, comm: Communicator, groups: Groups | None, what: str
) -> dict[str, Any]:
    """Returns the attributes of a custom call through windows of NCCL.

    XLA names the devices of a program by their numbers in it, which are those in its mesh.
    """
    attributes = gpu_attributes("window", ctx, comm, groups, what)
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    numbers = mesh_groups(mesh, comm.axis_names, comm.group_axes, are_numbered=True)
    numbers = numbers or range(len(attributes["device_table"]))  # of the default mesh
    return {**attributes, "partitions": np.array(numbers, np.int64).reshape(-1)}


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
    return {"device_table": np.array([-1], np.int64), "memory": "devices", "site": np.int64(0)}
