"""Dtypes of computations, the same in every promotion mode of JAX."""

from typing import Any

import jax
import numpy as np


def sum_dtype(*dtypes: Any) -> np.dtype:
    """Returns the dtype of sums: float64 if any of these types is float64, else float32."""
    is_double = any(np.dtype(dtype) == np.float64 for dtype in dtypes)
    return np.dtype(np.float64 if is_double else np.float32)


def index_dtype(dtype: Any) -> np.dtype:
    """Returns a signed type of at least 32 bits that holds an integer type, if JAX enables it."""
    dtype = np.dtype(dtype)
    is_wide = dtype.itemsize > 4 or dtype == np.uint32
    return jax.dtypes.canonicalize_dtype(np.int64 if is_wide else np.int32)
