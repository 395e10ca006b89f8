"""The BLAS of the CPU's GEMMs: the one of SciPy, which comes with JAX."""

import functools
import importlib
from typing import Any

from jax_cp_dispatch._ranks import runtime


@functools.cache
def load_blas() -> str:
    """Loads it, once; returns the file of the library, or "" where SciPy's own routines are called.

    Raises:
      ImportError: SciPy, which JAX depends on, is not there.
    """
    cython_blas: Any = importlib.import_module("scipy.linalg.cython_blas")

    routines = cython_blas.__pyx_capi__  # what jaxlib's LAPACK uses, too
    return runtime.native.load_blas(routines["sgemm"], routines["dgemm"])
