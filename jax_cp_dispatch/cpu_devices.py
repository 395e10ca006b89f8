"""Starts virtual CPU devices with enough threads and memory; warns if threads are too few."""

import ctypes
import os
import re
import threading

import jax
import jaxlib.version

from jax_cp_dispatch._text import warn_caller

__all__ = ["keep_freed_memory", "start_cpu_devices"]

# Measured with a chain of small psum programs in flight: it hangs on 0.10.2 and 0.11.2, and runs on
# 0.12.0.1. It hangs with 2 * devices - 1 threads and runs with 2 * devices, for 2, 4, 8 and 32
# devices.
_FIRST_SAFE_JAXLIB = (0, 12)
_THREADS_PER_DEVICE = 2

_warn_lock = threading.Lock()
_has_warned = False
_memory_is_settled = False


def start_cpu_devices(num_devices: int, *, keep_memory: bool = True) -> None:
    """Makes JAX start with `num_devices` virtual CPU devices and enough threads for them.

    Call before JAX is used. Sets `jax_platforms`, `jax_num_cpu_devices` and the environment
    variable `PJRT_NPROC`, which the backend reads when it starts. Does nothing if the backend has
    already started with this number of devices.

    Args:
      num_devices: CPU devices of this process.
      keep_memory: see `keep_freed_memory`. False leaves the allocator unchanged, also in later
        calls.
    Raises:
      ValueError: `num_devices` is not positive.
      RuntimeError: JAX has already started with another number of CPU devices, or this is one of
        several processes, started with another number.
    """
    if num_devices < 1:
        raise ValueError(
            f"start_cpu_devices: num_devices is {num_devices}; it needs to be at least 1."
        )
    processes, given = map(os.environ.get, ("JAX_NUM_PROCESSES", "JAX_NUM_CPU_DEVICES"))
    if processes not in (None, "1") and given not in (None, str(num_devices)):
        raise RuntimeError(
            f"start_cpu_devices: this is one of {processes} processes with {given} CPU devices "
            f"each, but num_devices is {num_devices}. Call it only in a program of one process: if "
            "initialize() returns the implementation 'in_process'."
        )
    try:
        # One of the two is a change, and JAX rejects changes once its backend has started.
        jax.config.update("jax_num_cpu_devices", -1)
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        found = jax.device_count("cpu")
        if found == num_devices:
            return
        raise RuntimeError(
            f"start_cpu_devices: JAX has started with {found} CPU devices but needs {num_devices}. "
            "Call this before you create an array or call jax.devices()."
        ) from error
    jax.config.update("jax_platforms", "cpu")
    keep_freed_memory(enable=keep_memory)
    num_threads = max(_num_threads(), _THREADS_PER_DEVICE * num_devices)
    os.environ["PJRT_NPROC"] = str(num_threads)


def keep_freed_memory(*, enable: bool = True) -> None:
    """Lets this process keep freed memory for the next arrays.

    Otherwise the memory returns to the system and is mapped again page by page, which takes several
    times as long as a copy. Two gigabytes at the end of the heap are kept, and below them what lies
    between live arrays: a process whose arrays are large can take twice their memory.

    The setting applies to all allocations of the process and needs glibc. Only the first call has
    an effect: by `start_cpu_devices`, or, later and with somewhat less effect, by the first program
    with an exchange between several CPU devices. Does nothing if the environment configures the
    allocator (`MALLOC_...`, `GLIBC_TUNABLES`).
    """
    global _memory_is_settled
    if _memory_is_settled:
        return
    _memory_is_settled = True
    is_taken = any(name.startswith("MALLOC_") for name in os.environ) or (
        "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    )
    if not enable or is_taken:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    # Numbers from malloc.h. The padding prevents the return of the arenas' 64 MB heaps; a single
    # arena, possible if no others exist yet, has no such heaps. No allocation has a mapping of its
    # own, which is unmapped when it is freed.
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8
    for option, value in (
        (trim_threshold, 2**31 - 1),
        (top_pad, 64 << 20),
        (mmap_max, 0),
        (arena_max, 1),
    ):
        mallopt(option, value)


def warn_of_deadlock(num_devices: int) -> None:
    """Warns, once per process, if programs in flight over its CPU devices can deadlock."""
    global _has_warned
    if _has_warned or num_devices < 2 or _num_threads() >= _THREADS_PER_DEVICE * num_devices:
        return
    release = re.findall(r"\d+", jaxlib.version.__version__)[:2]
    if tuple(map(int, release)) >= _FIRST_SAFE_JAXLIB:
        return
    with _warn_lock:
        if _has_warned:
            return
        _has_warned = True
    warn_caller(
        f"jax_cp_dispatch: jaxlib {jaxlib.version.__version__} runs the programs of {num_devices} "
        f"CPU devices on {max(_num_threads(), num_devices)} threads. With many programs in flight "
        "threads that wait in a collective can block the ranks they wait for: the program hangs, "
        "also without this package. jaxlib 0.12 is not affected. Set the environment variable "
        f"PJRT_NPROC={_THREADS_PER_DEVICE * num_devices} before JAX is used, or call "
        f"jax_cp_dispatch.cpu_devices.start_cpu_devices({num_devices}) first.",
        RuntimeWarning,
    )


def _num_threads() -> int:
    """Returns the threads of the CPU backend, unless it has more devices than that."""
    for name in ("PJRT_NPROC", "NPROC"):  # in the order in which XLA reads them
        value = os.environ.get(name, "")
        if re.fullmatch(r"\d+", value):
            return int(value)
    return len(os.sched_getaffinity(0))
