"""Loads the native extensions and registers their XLA FFI targets; no other module imports them."""

import ctypes
import functools
import importlib
import importlib.util
import pathlib
import re
from typing import Any

import jax
import jaxlib.version

MIN_JAX_VERSION = (0, 10, 2)

try:
    from jax_cp_dispatch import _cpu
except ImportError as error:
    raise ImportError(
        "jax_cp_dispatch: the native extension '_cpu' is missing or does not load "
        f"({error}). Installing the package builds it: run `pip install .` in the source tree "
        "with a C++17 compiler, and import the package from outside that tree; or install with "
        "`pip install -e .`."
    ) from error


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _installed_ffi_api_version() -> tuple[int, int] | None:
    """Returns (major, minor) of the installed jaxlib's FFI; None if it is not stated."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return None
    header = pathlib.Path(spec.submodule_search_locations[0], "include/xla/ffi/api/c_api.h")
    if not header.is_file():
        return None
    text = header.read_text()
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(found[1]) if found else 0 for found in numbers)
    return major, minor


def check_versions(
    *,
    jax_version: str,
    jaxlib_version: str,
    built_ffi: tuple[int, int],
    installed_ffi: tuple[int, int] | None,
) -> None:
    """Rejects versions that would fail later, with less clear errors.

    An extension built with newer FFI headers than the installed jaxlib's would prevent the whole
    CPU backend from starting. `built_ffi` and `installed_ffi` are (major, minor) of both; without
    the second, the headers are not compared.
    """
    needed = ".".join(map(str, MIN_JAX_VERSION))
    for name, found in (("jax", jax_version), ("jaxlib", jaxlib_version)):
        if _version(found) < MIN_JAX_VERSION:
            raise ImportError(
                f"jax_cp_dispatch: found {name} {found} but needs {name}>={needed}. "
                f"Run `pip install --upgrade 'jax>={needed}'`."
            )
    if installed_ffi is None:
        return
    if built_ffi[0] != installed_ffi[0] or built_ffi[1] > installed_ffi[1]:
        built, offered = (".".join(map(str, v)) for v in (built_ffi, installed_ffi))
        raise ImportError(
            f"jax_cp_dispatch: its extension was built with XLA FFI headers {built} but jaxlib "
            f"{jaxlib_version} offers {offered}. Upgrade jaxlib, or reinstall the package with "
            "`pip install --force-reinstall --no-deps .`, which builds with the oldest supported "
            "headers."
        )


check_versions(
    jax_version=jax.__version__,
    jaxlib_version=jaxlib.version.__version__,
    built_ffi=_cpu.ffi_api_version(),
    installed_ffi=_installed_ffi_api_version(),
)


native = _cpu
"""The extension, for modules that call it directly instead of through XLA."""

DISPATCH_TARGET = "jax_cp_dispatch.dispatch"
COMBINE_TARGET = "jax_cp_dispatch.combine"
EXCHANGE_DONE_TARGET = "jax_cp_dispatch.exchange_done"  # on GPUs
GEMM_TARGET = "jax_cp_dispatch.gemm"
GROUPED_GEMM_TARGET = "jax_cp_dispatch.grouped_gemm"

for _name, _stages in _cpu.registrations().items():
    jax.ffi.register_ffi_target(_name, _stages, platform="cpu")


# ---- CUDA: separate extensions, which may be absent.


def _load_cuda() -> tuple[Any, str]:
    """Returns the extension for GPUs; or None, and the reason."""
    if importlib.util.find_spec("jax_cp_dispatch._cuda") is None:
        return None, (
            "the package was built without CUDA; reinstall it on a machine with nvcc, with "
            "`CPD_CUDA=ON pip install .`"
        )
    try:
        module = importlib.import_module("jax_cp_dispatch._cuda")
        check_versions(
            jax_version=jax.__version__,
            jaxlib_version=jaxlib.version.__version__,
            built_ffi=module.ffi_api_version(),
            installed_ffi=_installed_ffi_api_version(),
        )
    except ImportError as error:
        return None, f"the extension '_cuda' does not load ({error})"
    for name, stages in module.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    return module, ""


cuda, cuda_reason = _load_cuda()
"""The extension for GPUs and ""; or None and the reason. It loads without a GPU."""


def _in_wheels(*places: tuple[str, str]) -> str:
    """Returns the first file there is, of (package, path in it); or ""."""
    for package, path in places:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            if (file := pathlib.Path(folder, path)).is_file():
                return str(file)
    return ""


def nvshmem_library() -> str:
    """Returns the file of NVSHMEM's library in its wheel, or "".

    It is opened before the extension, whose search path is wrong after `pip install --target`.
    """
    return _in_wheels(("nvidia.nvshmem", "lib/libnvshmem_host.so.3"))


@functools.cache
def open_cublaslt() -> str:
    """Opens cuBLASLt if it is installed as a wheel; returns its file, or "" if it is not.

    The extension then finds it by name, like a library of the system or one that JAX has opened.
    """
    library = _in_wheels(
        ("nvidia", "cu13/lib/libcublasLt.so.13"),
        ("nvidia.cublas", "lib/libcublasLt.so.13"),
        ("nvidia.cublas", "lib/libcublasLt.so.12"),
    )
    if library:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return library


def why_no_communicators() -> str:
    """Returns why the installed XLA hands out no communicators to custom calls, or ""."""
    found = jaxlib.version.__version__
    if _version(found) >= (0, 11, 2):
        return ""
    return f"jaxlib {found} hands out no communicators, which needs 0.11.2 or newer"


@functools.cache
def why_no_nccl() -> str:
    """Returns why windows of NCCL cannot be used on the GPUs here, or ""; "" without GPUs."""
    if cuda is None or cuda.device_count()[0] == 0:
        return ""  # a program for another machine
    if library := _in_wheels(("nvidia.nccl", "lib/libnccl.so.2")):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # found by its name from now on
    return cuda.why_no_nccl()


def load_nvshmem() -> tuple[Any, str]:
    """Returns the extension for NVSHMEM and ""; or None and the reason. Does not start NVSHMEM."""
    if importlib.util.find_spec("jax_cp_dispatch._nvshmem") is None:
        return None, (
            "the package was built without NVSHMEM; install nvidia-nvshmem-cu13, then reinstall "
            "the package with `CPD_CUDA=ON pip install .`"
        )
    try:
        if library := nvshmem_library():
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module("jax_cp_dispatch._nvshmem"), ""
    except (ImportError, OSError) as error:
        return None, f"the extension '_nvshmem' does not load ({error}); is NVSHMEM installed?"


def release_buffer(id: int) -> None:
    if cuda is not None:
        cuda.release_buffer(id)


def restore_buffer(id: int) -> None:
    if cuda is not None:
        cuda.restore_buffer(id)


def raise_gpu_errors() -> None:
    """Raises the errors that GPUs found in exchanges and that no call has raised yet.

    A GPU detects an invalid plan or a missing rank after the host has continued. The results are
    then NaN (-1 for integers), and the next call over the same ranks raises the error. Call this
    function after `jax.block_until_ready` to raise it earlier; `check_before_save` does both. If
    the environment variable `JAX_CP_DISPATCH_CHECK=1` is set, every call waits and raises its own
    errors.

    Raises:
      RuntimeError: the errors, one per line.
    """
    errors = cuda.take_errors() if cuda is not None else []
    if errors:
        raise RuntimeError("\n".join(errors))


def check_before_save(state: Any) -> Any:
    """Returns `state`, once it is computed and no GPU has found an error.

    Pass the latest state of a training loop through it where it is given to a checkpointer:

        manager.save(step, args=ocp.args.StandardSave(gpu.check_before_save(state)))

    After an exchange that failed on a GPU, the state is NaN, and the host may be several steps
    ahead. Then this raises before the checkpointer begins, so nothing is committed: in several
    processes, a checkpoint is complete only if all of them save. Saving waits for the state anyway.

    Args:
      state: a pytree with arrays.
    Returns:
      The same.
    Raises:
      RuntimeError: the errors that GPUs of this process have found and no call has raised yet.
    """
    state = jax.block_until_ready(state)
    raise_gpu_errors()
    return state
