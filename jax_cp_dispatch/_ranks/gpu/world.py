"""Connects the GPUs of several processes, and says how programs over all of them exchange."""

import os
import pathlib
import socket
import time
from functools import partial
from typing import Any, NamedTuple

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu.nvshmem import connect_nvshmem
from jax_cp_dispatch._ranks.gpu.slabs import GpuJob, Slabs, connect_ipc, describe_mapping
from jax_cp_dispatch._ranks.job import publish, publish_and_read_all, read_from

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

    With NVSHMEM, a GPU uses pointers to memory that it can map, and the network to reach other
    hosts. `JAX_CP_DISPATCH_GPU_POINTERS=0` makes it use the network for all others. Every process
    reserves `JAX_CP_DISPATCH_SYMMETRIC_BYTES` of its GPU's memory (default 1 GiB).

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
    found = publish_all("ready", [_why_not_ready(), len(_local_gpus()), _host(), _slab_bytes()])
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
    device = _local_gpus()[0].local_hardware_id
    job = GpuJob(publish_all, jax.process_index(), device or 0, hosts, sizes[0])
    ways = {"cuda_ipc": connect_ipc, "nvshmem": partial(connect_nvshmem, is_named=bool(wanted))}
    num_hosts = len(set(hosts))
    for name in sorted(ways, reverse=num_hosts > 1):  # the better one first
        if wanted in (None, name):
            slabs = ways[name](job)
            if isinstance(slabs, Slabs):
                _use(job, slabs)
                return _describe(slabs, num_hosts, reasons), slabs
            reasons.append(f"{name}: {slabs}")
    return GpuWorld("xla", "; ".join(reasons)), None


def _use(job: GpuJob, slabs: Slabs) -> None:
    """Gives the slabs to the extension, from which the processes allocate channels together."""
    runtime.cuda.set_slab(slabs.bases, job.slab_bytes, slabs.memory_groups, job.process)
    runtime.cuda.set_agree(_agree)


def _agree(
    name: str, message: str, processes: list[int], milliseconds: int
) -> tuple[list[str], str]:
    """Publishes a message; returns those of `processes` in their order, and an error or ""."""
    end = time.monotonic() + milliseconds / 1000
    found: dict[int, str] = {}
    publish("channel", name, message, may_repeat=True)
    for process in sorted(set(processes)):
        try:
            left = max(0.001, end - time.monotonic())
            found[process] = read_from("channel", name, process, left)
        except RuntimeError:
            return [], (
                f"process {process} did not come to this call within {milliseconds / 1000:g} s, "
                "three deadlines, which a first call has. It runs another program, has ended, or "
                "is slower; pass a longer deadline."
            )
    return [found[process] for process in processes], ""


def _describe(slabs: Slabs, num_hosts: int, reasons: list[str]) -> GpuWorld:
    num_processes = len(slabs.bases)
    where = f"{num_processes} processes of {num_hosts} host{'s' * (num_hosts > 1)}, one GPU each"
    if slabs.reach(range(num_processes)):
        if len(set(slabs.memory_groups)) > 1:
            where += f": {describe_mapping(slabs.memory_groups)}"
        return GpuWorld(slabs.transport, "; ".join([where, *reasons]))
    inside = f"groups of ranks inside one host use {slabs.transport}"
    return GpuWorld("xla", "; ".join([where, *reasons, inside]))


def _slab_bytes() -> int:
    text = os.environ.get(_SLAB_VARIABLE, str(_SLAB_BYTES))
    if not text.isdecimal() or int(text) < 1 << 20:
        raise ValueError(f"connect_gpus: {_SLAB_VARIABLE} is {text!r}; it needs at least 1048576.")
    return int(text)


def _why_not_ready() -> str:
    """Returns the first obstacle that a process can find alone, or ""."""
    if runtime.cuda is None:
        return runtime.cuda_reason
    num_gpus, reason = runtime.cuda.device_count()
    return f"this process has no GPU: {reason}" if num_gpus == 0 else ""


def _local_gpus() -> list[Any]:
    return jax.local_devices()


def _host() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"
