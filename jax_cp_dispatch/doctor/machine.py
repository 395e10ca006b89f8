"""Checks the machine: versions, devices, GPUs, shared memory and limits."""

import ctypes.util
import importlib.metadata
import os
import pathlib
import platform
import resource
import shutil
import warnings
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_cp_dispatch.attention.local import gpu
from jax_cp_dispatch.cpu_devices import warn_of_deadlock


class Finding(NamedTuple):
    """One row of the report.

    Attributes:
      name: what was checked.
      found: what was found.
      verdict: "ok"; "missing" if the package works without it; "wrong" if it does not.
      remedy: what to do, if anything.
    """

    name: str
    found: str
    verdict: Literal["ok", "missing", "wrong"] = "ok"
    remedy: str = ""


# The receive buffers of a model soon fill less shared memory than this.
_SMALL_SHARED_MEMORY = 1 << 30


def look_at_machine() -> Iterator[Finding]:
    """Yields findings; starts JAX's backend."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield _processor()
    yield Finding("jax", f"{jax.__version__}, jaxlib {_find_version('jaxlib')}")
    yield _devices()
    yield _threads()
    yield _gpu()
    if has_gpu():
        yield _attention_on_gpus()
    yield _nvshmem()
    yield _shared_memory()
    yield _peer_access()
    yield _open_files()
    yield _pictures()


def has_gpu() -> bool:
    """Whether an NVIDIA GPU driver is present; does not use JAX."""
    return pathlib.Path("/dev/nvidiactl").exists()


def _find_version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _processor() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return Finding("processor", f"{platform.machine()}, {cores} cores, {_bytes(memory)}")


def _devices() -> Finding:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        remedy = "Set JAX_PLATFORMS=cpu, or repair the platform that JAX names."
        return Finding("devices", str(error).splitlines()[0], "wrong", remedy)
    found = f"{len(devices)} of {devices[0].platform}, {jax.process_count()} process(es)"
    if len(devices) > 1:
        return Finding("devices", found)
    remedy = "For several virtual ones: jax_cp_dispatch.cpu_devices.start_cpu_devices(n)."
    return Finding("devices", found, "missing", remedy)


def _threads() -> Finding:
    found = f"PJRT_NPROC={os.environ.get('PJRT_NPROC', '(not set)')}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_deadlock(jax.local_device_count() if jax.default_backend() == "cpu" else 0)
    if caught:
        remedy = str(caught[0].message).rsplit("Set ", 1)[-1]
        return Finding("threads of XLA", found, "wrong", f"Set {remedy}")
    return Finding("threads of XLA", found)


def _gpu() -> Finding:
    plugin = _find_version("jax-cuda13-plugin", "jax-cuda12-plugin")
    if not has_gpu():
        remedy = "Only for GPUs: a machine with an NVIDIA GPU and its driver."
        return Finding("GPU", "no NVIDIA driver", "missing", remedy)
    if plugin is None:
        remedy = "pip install 'jax[cuda13]', or [cuda12] for an older driver."
        return Finding("GPU", "a driver, but JAX has no CUDA plugin", "missing", remedy)
    return Finding("GPU", f"a driver, and JAX's CUDA plugin {plugin}")


_HEADS = (64, 128, 256)


def _attention_on_gpus() -> Finding:
    reasons = {size: gpu.why_not(jnp.dtype("bfloat16"), (size, size)) for size in _HEADS}
    served = [size for size, reason in reasons.items() if reason is None]
    if not served:
        remedy = "Build the package with CUDA, and do not set JAX_CP_DISPATCH_ATTENTION_KERNEL=0."
        found = f"slow passes: {reasons[_HEADS[0]]}"
        return Finding("attention on GPUs", found, "missing", remedy)
    found = "kernels for bfloat16 and float16; slow passes for float32 and heads above"
    return Finding("attention on GPUs", f"{found} {max(served)}")


def _nvshmem() -> Finding:
    package = _find_version("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
    library = ctypes.util.find_library("nvshmem_host")
    if package or library:
        return Finding("NVSHMEM", f"package {package}" if package else str(library))
    remedy = "Only for GPUs of several hosts: pip install nvidia-nvshmem-cu13 (or -cu12)."
    return Finding("NVSHMEM", "neither package nor library", "missing", remedy)


def _shared_memory() -> Finding:
    folder = pathlib.Path("/dev/shm")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        remedy = "Mount it: mount -t tmpfs tmpfs /dev/shm."
        return Finding("shared memory", "/dev/shm cannot be written", "missing", remedy)
    usage = shutil.disk_usage(folder)
    found = f"/dev/shm has {_bytes(usage.free)} free of {_bytes(usage.total)}"
    if usage.free >= _SMALL_SHARED_MEMORY:
        return Finding("shared memory", found)
    remedy = "Enlarge it: mount -o remount,size=8G /dev/shm; for a container --shm-size=8g."
    return Finding("shared memory", found, "missing", remedy)


def _peer_access() -> Finding:
    setting = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = setting.read_text().strip() if setting.is_file() else "0"
    found = f"ptrace_scope is {scope}"
    if scope == "0":
        return Finding("memory of other processes", found)
    remedy = "Only for copies straight into a peer's memory: sysctl kernel.yama.ptrace_scope=0."
    return Finding("memory of other processes", found, "missing", remedy)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft}, at most {hard}"
    if soft == resource.RLIM_INFINITY or soft >= 1024:
        return Finding("open files", found)
    remedy = "Only for jobs of several processes: raise the limit, ulimit -n 1024."
    return Finding("open files", found, "missing", remedy)


def _pictures() -> Finding:
    version = _find_version("matplotlib")
    if version:
        return Finding("pictures", f"matplotlib {version}")
    remedy = "pip install 'jax_cp_dispatch[plots]'."
    return Finding("pictures", "no matplotlib", "missing", remedy)
