"""Channels in pinned memory of the host, in place of the memory that CUDA IPC shares.

Then a GPU writes over PCIe, and what it signals must be ordered for the whole system, as between
GPUs. For stress_processes.py; the package never does this.
"""

import ctypes
import functools
import mmap
import os
from typing import Any

from jax_cp_dispatch._ranks import runtime

_PORTABLE_AND_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_*


def use_pinned_memory() -> None:
    """Replaces how slabs are made and opened. Call before `connect_gpus`."""
    runtime.cuda = _Pinned(runtime.cuda)


class _Pinned:
    """The extension, with other slabs."""

    def __init__(self, extension: Any):
        self._extension = extension
        self._mapped: list[Any] = []  # kept until the process ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)

    def make_slab(self, device: int, num_bytes: int) -> tuple[int, bytes]:
        fd = os.memfd_create("slab")
        os.ftruncate(fd, num_bytes)
        return self._map(device, fd, num_bytes), f"{os.getpid()} {fd} {num_bytes}".encode()

    def open_slab(self, device: int, handle: bytes) -> int:
        pid, fd, num_bytes = map(int, handle.split())
        other = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        return self._map(device, other, num_bytes)

    def _map(self, device: int, fd: int, num_bytes: int) -> int:
        """Returns the address at which the GPU reaches shared memory."""
        memory = mmap.mmap(fd, num_bytes)
        self._mapped.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        driver = _driver(device)
        here = ctypes.c_uint64()
        _check(driver.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PORTABLE_AND_MAPPED
        ), "cuMemHostRegister")  # fmt: skip
        _check(driver.cuMemHostGetDevicePointer_v2(
            ctypes.byref(here), ctypes.c_void_p(address), 0
        ), "cuMemHostGetDevicePointer")  # fmt: skip
        return here.value


@functools.cache
def _driver(device: int) -> Any:
    """Returns the driver, with JAX's context of the device current in this thread."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    retain = driver.cuDevicePrimaryCtxRetain
    _check(retain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return driver


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with {code}")
