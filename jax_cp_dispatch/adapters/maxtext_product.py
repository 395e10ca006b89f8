"""One product of MaxText's dense layers, by the dimension of the kernel that ranks share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_cp_dispatch.comm_gemm import all_gather_matmul, matmul_reduce_scatter

RANKS = "tensor_sequence"  # MaxText's axis for tensor and sequence parallelism


def shared_dimension(spec: Any) -> int | None:
    """Returns the dimension of a kernel that is sharded over the ranks and nothing else, if any."""
    names = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    return names.index((RANKS,)) if (RANKS,) in names else None


def multiply(x, kernel, dims, split: int | None, **options: Any) -> jax.Array:
    """Returns the product by ranks that share dimension `split` of the kernel; None: they do not.

    `dims` are dimension numbers as in `jax.lax.dot_general`.
    """
    contracted = len(dims[0][1])
    if split == 0 and kernel.ndim == contracted + 1:
        return matmul_reduce_scatter(x, kernel, axis_name=RANKS, **options)
    if split == 1 and contracted == 1:
        return all_gather_matmul(x, kernel, axis_name=RANKS, **options)
    if split == 2 and contracted == 1:  # several kernels of the same x
        kernels = tuple(jnp.moveaxis(kernel, 1, 0))
        products = all_gather_matmul(x, kernels, axis_name=RANKS, **options)
        return jnp.stack(products, axis=-2)
    return jax.lax.dot_general(x, kernel, dims)
