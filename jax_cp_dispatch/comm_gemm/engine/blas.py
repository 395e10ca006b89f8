"""The BLAS library for GEMMs on CPU (from SciPy, which JAX requires), and its threads."""

import functools
import importlib
import os
from typing import Any

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.processes import num_cpu_devices_here


@functools.cache
def load_blas() -> str:
    """Loads the library once; returns its file, or "" if SciPy's own routines are used.

    Raises:
      ImportError: SciPy, which JAX depends on, is not installed.
    """
    cython_blas: Any = importlib.import_module("scipy.linalg.cython_blas")

    routines = cython_blas.__pyx_capi__  # jaxlib's LAPACK uses it too
    return runtime.native.load_blas(sgemm=routines["sgemm"], dgemm=routines["dgemm"])


def threads_per_device() -> int:
    """Returns the threads of one GEMM while the other devices of this host run theirs."""
    return max(1, len(os.sched_getaffinity(0)) // num_cpu_devices_here())
