"""GEMMs of a few ranks, traced."""

from functools import partial
from typing import Any

import jax
import numpy as np
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import all_gather_matmul, gemm, matmul_reduce_scatter
from jax_cp_dispatch.buffers import create_comm_overlap_buffer

W, T, K, N = 4, 2, 3, 5
M = W * T

GATHER: Any = partial(all_gather_matmul, axis_name=AXIS, method="ring")
SCATTER: Any = partial(matmul_reduce_scatter, axis_name=AXIS, method="ring")
ENGINE: Any = partial(gemm, axis_name=AXIS)


def ones(*shape, dtype: Any = np.float32):
    return np.ones((W, *shape), dtype)


def trace(fn, *operands):
    """Traces a function of one rank on the mesh, without compiling."""
    return jax.eval_shape(on_ranks(fn, mesh_of(W), jit=False), *operands)


def create(kind, method, shape=None, dtype="float32", num_ranks=W, **options):
    shape = shape or ((M, K) if kind == "AG" else (M, N))
    return create_comm_overlap_buffer(kind, method, shape, dtype, num_ranks, **options)
