"""Virtual CPU devices, with the threads and the memory that their programs need.

And a warning where devices that were started otherwise lack threads.
"""

import ctypes
import os
import re
import threading
import warnings

import jax
import jaxlib.version

__all__ = ["keep_freed_memory", "start_cpu_devices"]

# A chain of small psum programs in flight: stuck on 0.10.2 and 0.11.2, right on 0.12.0.1. Stuck
# with 2 * devices - 1 threads, right with 2 * devices, for 2, 4, 8 and 32 devices.
_FIRST_SAFE_JAXLIB = (0, 12)
_THREADS_PER_DEVICE = 2

_warn_lock = threading.Lock()
_has_warned = False
_memory_is_settled = False


def start_cpu_devices(num_devices: int, *, keep_memory: bool = True) -> None:
    """Makes JAX start with `num_devices` virtual CPU devices, and with threads enough for them.

    Call before JAX is used: sets `jax_platforms`, `jax_num_cpu_devices` and the environment
    variable `PJRT_NPROC`, which are read when the backend starts. Once it has started with this
    number of devices, nothing is changed.

    Args:
      num_devices: CPU devices of this process.
      keep_memory: see `keep_freed_memory`; False leaves the allocator alone for good.
    Raises:
      ValueError: `num_devices` is not positive.
      RuntimeError: JAX has started already with another number of CPU devices.
    """
    if num_devices < 1:
        raise ValueError(
            f"start_cpu_devices: num_devices is {num_devices}; it needs to be at least 1."
        )
    try:
        # One of the two is a change, and JAX refuses a change once its backend is up.
        jax.config.update("jax_num_cpu_devices", -1)
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        found = jax.device_count("cpu")
        if found == num_devices:
            return
        raise RuntimeError(
            f"start_cpu_devices: JAX has started with {found} CPU devices but needs {num_devices}. "
            "Call this before the first array is made and before jax.devices() is asked."
        ) from error
    jax.config.update("jax_platforms", "cpu")
    keep_freed_memory(enable=keep_memory)
    num_threads = max(_num_threads(), _THREADS_PER_DEVICE * num_devices)
    os.environ["PJRT_NPROC"] = str(num_threads)


def keep_freed_memory(*, enable: bool = True) -> None:
    """Lets this process keep memory that arrays have freed, about a gigabyte, for the next ones.

    Otherwise it goes back to the system and comes again page by page, which takes several times as
    long as a copy. Concerns every allocation of the process, with glibc. The first call settles it:
    `start_cpu_devices`, or, later and with somewhat less effect, the first program with an exchange
    between several CPU devices. Left alone where the environment already speaks to the allocator
    (`MALLOC_...`, `GLIBC_TUNABLES`) or sets `JAX_CP_DISPATCH_KEEP_MEMORY=0`.
    """
    global _memory_is_settled
    if _memory_is_settled:
        return
    _memory_is_settled = True
    is_taken = any(name.startswith("MALLOC_") for name in os.environ) or (
        "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    )
    if not enable or is_taken or os.environ.get("JAX_CP_DISPATCH_KEEP_MEMORY") == "0":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    # Numbers from malloc.h. The padding keeps the 64 MB heaps of arenas from being given back; one
    # arena, where there are no others yet, does without; the mapping threshold is at its maximum,
    # because what is mapped alone is unmapped when it is freed.
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
    for option, value in (
        (trim_threshold, 1 << 30),
        (top_pad, 64 << 20),
        (mmap_threshold, 32 << 20),
        (arena_max, 1),
    ):
        mallopt(option, value)


def warn_of_deadlock(num_devices: int) -> None:
    """Warns, once per process, if programs in flight over these devices can wait for ever.

    Args:
      num_devices: CPU devices of this process.
    """
    global _has_warned
    if _has_warned or not _can_deadlock(jaxlib.version.__version__, num_devices, _num_threads()):
        return
    with _warn_lock:
        if _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"jax_cp_dispatch: jaxlib {jaxlib.version.__version__} runs the programs of {num_devices} "
        f"CPU devices on {max(_num_threads(), num_devices)} threads. With many programs in flight "
        "the threads that wait in a collective can leave none for the ranks they wait for, and it "
        "never ends, also without this package; not so on jaxlib 0.12. Set the environment "
        f"variable PJRT_NPROC={_THREADS_PER_DEVICE * num_devices} before JAX is used, or call "
        f"jax_cp_dispatch.cpu_devices.start_cpu_devices({num_devices}) first.",
        RuntimeWarning,
        stacklevel=2,
    )


def _can_deadlock(jaxlib_version: str, num_devices: int, num_threads: int) -> bool:
    release = tuple(int(part) for part in re.findall(r"\d+", jaxlib_version)[:2])
    return (
        num_devices > 1
        and num_threads < _THREADS_PER_DEVICE * num_devices
        and release < _FIRST_SAFE_JAXLIB
    )


def _num_threads() -> int:
    """The threads that the CPU backend starts with, if its devices are not more."""
    for name in ("PJRT_NPROC", "NPROC"):  # in the order in which XLA reads them
        value = os.environ.get(name, "")
        if re.fullmatch(r"\d+", value):
            return int(value)
    return len(os.sched_getaffinity(0))
