"""Connects the processes of each host through CUDA IPC."""

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu.slabs import GpuJob, Slabs, first_reason, why_patterns_are_lost


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
