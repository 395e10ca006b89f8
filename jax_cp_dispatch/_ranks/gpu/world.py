"""Connects the GPUs of several processes: each provides one slab of memory that all can reach."""

import os
import pathlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu.shared_memory_groups import (
    describe_shared_memory_groups,
    find_shared_memory_groups,
)
from jax_cp_dispatch._ranks.job import publish_and_read_all

_SLAB_BYTES = 1 << 30
_SLAB_VARIABLE = "JAX_CP_DISPATCH_SYMMETRIC_BYTES"
_TRANSPORT_VARIABLE = "JAX_CP_DISPATCH_GPU_TRANSPORT"
_POINTERS_VARIABLE = "JAX_CP_DISPATCH_GPU_POINTERS"

# (name, value) -> the values of all processes
_Publish = Callable[[str, Any], list[Any]]


class GpuWorld(NamedTuple):
    """The implementation for programs over the GPUs of several processes.

    Attributes:
      implementation: "nvshmem", "cuda_ipc", "cuda_peer" for one process, or "xla".
      reason: why it was chosen.
    """

    implementation: str
    reason: str


_world: GpuWorld | None = None
_memory_groups: list[int] = []


def connected_gpus() -> GpuWorld | None:
    """Returns the choice of `connect_gpus`, or None before that call."""
    return _world


def connected_shared_memory_groups() -> list[int]:
    """Returns each process's group (see `find_shared_memory_groups`); [] before it is known."""
    return _memory_groups


def connect_gpus(*, timeout: float = 120.0) -> GpuWorld:
    """Connects this process's GPU to the GPUs of the other processes of the job.

    Call in every process, after `jax.distributed.initialize` and before a program is compiled. Uses
    NVSHMEM if it is installed, else CUDA IPC on one host, else XLA's collectives. Set
    `JAX_CP_DISPATCH_GPU_TRANSPORT` to nvshmem or cuda_ipc to force one. With NVSHMEM, a GPU uses
    pointers to memory that it can map, and the network to reach other hosts.
    `JAX_CP_DISPATCH_GPU_POINTERS=0` makes it use the network for all others. Every process reserves
    `JAX_CP_DISPATCH_SYMMETRIC_BYTES` of its GPU's memory (default 1 GiB).

    Args:
      timeout: seconds to wait for each of the other processes.
    Returns:
      The choice, the same in all processes, and the reason.
    Raises:
      RuntimeError: another process did not join.
      ValueError: an environment variable is invalid.
    """
    global _world
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
    publish = partial(publish_and_read_all, "connect_gpus", timeout=timeout)
    failed = publish("ready", _why_not_ready())
    reasons = [f"process {p}: {why}" for p, why in enumerate(failed) if why]
    if not reasons:
        for name, connect in (("nvshmem", _connect_nvshmem), ("cuda_ipc", _connect_ipc)):
            if wanted in (None, name):
                reason = connect(publish)
                if reason is None:
                    chosen = f"{jax.process_count()} processes, one GPU each"
                    if len(set(_memory_groups)) > 1:
                        chosen += f": {describe_shared_memory_groups(_memory_groups)}"
                    _world = GpuWorld(name, "; ".join([chosen, *reasons]))
                    return _world
                reasons.append(f"{name}: {reason}")
    _world = GpuWorld("xla", "; ".join(reasons))
    return _world


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
    if num_gpus == 0:
        return f"this process has no GPU: {reason}"
    if jax.local_device_count() != 1:
        return f"{jax.local_device_count()} GPUs in this process, but it needs exactly one"
    return ""


def _device() -> int:
    return jax.local_devices()[0].local_hardware_id


def _host() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def _may_network() -> bool:
    """Whether NVSHMEM may find a network here. If it needs one and finds none, it exits."""
    adapters = pathlib.Path("/sys/class/infiniband")
    is_named = os.environ.get(_TRANSPORT_VARIABLE) == "nvshmem" or (
        "NVSHMEM_REMOTE_TRANSPORT" in os.environ
    )
    return is_named or (adapters.is_dir() and any(adapters.iterdir()))


def what_hosts_lack(hosts: list[tuple[str, bool]]) -> str | None:
    """Returns which process of several hosts has no network for NVSHMEM; None if all may start it.

    Args:
      hosts: for each process, its host and whether NVSHMEM may find a network there.
    """
    if len({host for host, _ in hosts}) == 1 or all(found for _, found in hosts):
        return None
    process, (host, _) = next((p, h) for p, h in enumerate(hosts) if not h[1])
    return (
        f"process {process} of several hosts, on {host}, has no InfiniBand adapter "
        "(/sys/class/infiniband); if another network or NVLink connects the hosts, set "
        f"NVSHMEM_REMOTE_TRANSPORT or {_TRANSPORT_VARIABLE}=nvshmem"
    )


def _first_reason(reasons: list[str]) -> str | None:
    found = [f"process {process}: {reason}" for process, reason in enumerate(reasons) if reason]
    return found[0] if found else None


def _connect_nvshmem(publish: _Publish) -> str | None:
    """Returns None if connected, otherwise the reason, the same in all processes."""
    module, why = runtime.load_nvshmem()
    for name, value in (("NVSHMEM_DISABLE_NCCL", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
        os.environ.setdefault(name, value)
    # The heap holds the slab and NVSHMEM's own data.
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(_slab_bytes() + (64 << 20)))
    version = module.version() if module else ""
    published = publish("nvshmem", [[why, version, _slab_bytes()], [_host(), _may_network()]])
    facts = [fact for fact, _ in published]
    missing = _first_reason([fact[0] for fact in facts])
    if missing is not None:
        return missing
    if module is None or any(fact != facts[0] for fact in facts):
        return f"versions or {_SLAB_VARIABLE} differ: {facts}"
    missing = what_hosts_lack([host for _, host in published])
    if missing is not None:
        return missing
    process = jax.process_index()
    try:
        first = list(module.unique_id()) if process == 0 else []
        unique_id = bytes(publish("unique_id", first)[0])
        module.start(process, jax.process_count(), unique_id, _device())
        slabs, failed = module.make_slab(_slab_bytes()), ""
    except RuntimeError as error:
        slabs, failed = [], str(error)
    if slabs and not all(slabs) and os.environ.get("NVSHMEM_REMOTE_TRANSPORT") == "none":
        failed = (
            f"cannot map the memory of process {slabs.index(0)} (no NVLink or PCIe between them), "
            "and NVSHMEM_REMOTE_TRANSPORT is none"
        )
    uses_pointers = os.environ.get(_POINTERS_VARIABLE, "1") != "0"
    mapped = [p == process or (uses_pointers and slab != 0) for p, slab in enumerate(slabs)]
    found = publish("nvshmem_slab", [failed, mapped])
    missing = _first_reason([reason for reason, _ in found])
    if missing is not None:
        return missing
    memory_groups = find_shared_memory_groups([mapped for _, mapped in found])
    return _use_slabs(publish, module, slabs, memory_groups)


def _use_slabs(
    publish: _Publish, module: Any, slabs: list[int], memory_groups: list[int]
) -> str | None:
    """Passes the slabs, and the launcher of network kernels, to the extension."""
    process, failed = jax.process_index(), ""
    if len(set(memory_groups)) > 1:
        try:
            runtime.cuda.set_network_launcher(module.launcher(_device()))
        except RuntimeError as error:
            failed = str(error)
        missing = _first_reason(publish("nvshmem_launcher", failed))
        if missing is not None:
            return missing
    # To name memory of another process, NVSHMEM expects this process's address of its own slab.
    bases = [
        slabs[p if memory_groups[p] == memory_groups[process] else process]
        for p in range(len(slabs))
    ]
    _remember_slabs(bases, memory_groups)
    return None


def _remember_slabs(bases: list[int], memory_groups: list[int]) -> None:
    global _memory_groups
    runtime.cuda.set_slab(bases, _slab_bytes(), memory_groups)
    _memory_groups = memory_groups


def _connect_ipc(publish: _Publish) -> str | None:
    """Returns None if connected, otherwise the reason, the same in all processes."""
    hosts = publish("host", [_host(), _slab_bytes()])
    if any(other != hosts[0] for other in hosts):
        return f"the processes run on several hosts, or with different {_SLAB_VARIABLE}: {hosts}"
    process, failed, address, handle = jax.process_index(), "", 0, b""
    try:
        address, handle = runtime.cuda.make_slab(_device(), _slab_bytes())
    except RuntimeError as error:
        failed = str(error)
    handles = publish("ipc_handle", [failed, list(handle)])
    missing = _first_reason([other[0] for other in handles])
    if missing is not None:
        return missing
    try:
        slabs = [
            address
            if other == process
            else runtime.cuda.open_slab(_device(), bytes(handles[other][1]))
            for other in range(jax.process_count())
        ]
    except RuntimeError as error:
        slabs, failed = [], str(error)
    missing = _first_reason(publish("ipc_slab", failed))
    if missing is None:
        _remember_slabs(slabs, [0] * len(slabs))
    return missing
