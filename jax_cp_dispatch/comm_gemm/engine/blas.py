"""What GEMMs of CPU devices run on: the BLAS of SciPy, which comes with JAX, and threads."""

import functools
import importlib
import os
from typing import Any

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.implementations import num_cpu_devices_here


@functools.cache
def load_blas() -> str:
    """Loads it, once; returns the file of the library, or "" where SciPy's own routines are called.

    Raises:
      ImportError: SciPy, which JAX depends on, is not there.
    """
    cython_blas: Any = importlib.import_module("scipy.linalg.cython_blas")

    routines = cython_blas.__pyx_capi__  # what jaxlib's LAPACK uses, too
    return runtime.native.load_blas(routines["sgemm"], routines["dgemm"])


def threads_per_device() -> int:
    """Of one GEMM, while the other devices of this host run theirs."""
    return max(1, len(os.sched_getaffinity(0)) // num_cpu_devices_here())
