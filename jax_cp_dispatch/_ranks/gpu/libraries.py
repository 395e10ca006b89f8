"""Finds, where pip installs them, the CUDA libraries that the extension opens by name."""

import ctypes
import functools
import importlib.util
import pathlib

_PLACES = (
    ("nvidia", "cu13/lib/libcublasLt.so.13"),
    ("nvidia.cublas", "lib/libcublasLt.so.13"),
    ("nvidia.cublas", "lib/libcublasLt.so.12"),
)


@functools.cache
def open_cublaslt() -> str:
    """Opens cuBLASLt if it is installed as a wheel; returns its file, or "" if it is not.

    The extension then finds it by name, like a library of the system or one that JAX has opened.
    """
    for package, path in _PLACES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            library = pathlib.Path(folder, path)
            if library.is_file():
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
                return str(library)
    return ""
