"""Connects processes through NVSHMEM, which is tried in child processes first: it may end them."""

import os
import pathlib
from typing import Any

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu.nvshmem_trial import why_nvshmem_ends
from jax_cp_dispatch._ranks.gpu.slabs import (
    GpuJob,
    Slabs,
    first_reason,
    group_by_mapping,
    why_patterns_are_lost,
)

_POINTERS_VARIABLE = "JAX_CP_DISPATCH_GPU_POINTERS"
_OWN_BYTES = 64 << 20  # of the heap, beside the slab: NVSHMEM's own data


def connect_nvshmem(job: GpuJob, is_named: bool) -> Slabs | str:
    """Returns the slabs; or why there are none, the same in all processes.

    Args:
      job: this process.
      is_named: whether the user named NVSHMEM. It is then started without a trial.
    """
    module, why = runtime.load_nvshmem()
    for name, value in (("NVSHMEM_DISABLE_NCCL", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
        os.environ.setdefault(name, value)
    version = module.version() if module else ""
    facts = job.publish("nvshmem", [why, version, is_named or _may_network()])
    missing = first_reason([fact[0] for fact in facts])
    if missing is not None:
        return missing
    if module is None or any(fact[1] != version for fact in facts):
        return f"the versions of NVSHMEM differ: {[fact[1] for fact in facts]}"
    hosts = [(host, fact[2]) for host, fact in zip(job.hosts, facts, strict=True)]
    missing = what_hosts_lack(hosts)
    if missing is None and not is_named:
        missing = why_nvshmem_ends(job, module.__file__, runtime.nvshmem_library())
    if missing:
        return missing
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(job.slab_bytes + _OWN_BYTES))
    return _start(job, module)


def _may_network() -> bool:
    """Whether NVSHMEM may find a network here. If it needs one and finds none, it exits."""
    adapters = pathlib.Path("/sys/class/infiniband")
    is_named = "NVSHMEM_REMOTE_TRANSPORT" in os.environ
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
    slabs = Slabs("nvshmem", bases, memory_groups)
    missing = _set_launcher(job, module, slabs) or why_patterns_are_lost(job, slabs)
    return missing or slabs


def _set_launcher(job: GpuJob, module: Any, slabs: Slabs) -> str | None:
    """Passes the launcher of network kernels to the extension, if some are needed."""
    if len(set(slabs.memory_groups)) == 1:
        return None
    failed = ""
    try:
        runtime.cuda.set_network_launcher(module.launcher(job.device))
    except RuntimeError as error:
        failed = str(error)
    return first_reason(job.publish("nvshmem_launcher", failed))
