"""Tensor-parallel products of MaxText's dense layers, overlapped with their communication."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
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


@contextlib.contextmanager
def maxtext_gemms(**options: Any) -> Iterator[None]:
    """Overlaps products of MaxText models that are created in this block.

    Products with kernels that are sharded over the mesh axis "tensor_sequence" only (MLP and
    projections, with `ici_tensor_sequence_parallelism`) become `all_gather_matmul` or
    `matmul_reduce_scatter`. Others stay as they are. With `fused_qkv` and `fused_mlp`, the tokens
    of several kernels are gathered once. Installed in place of MaxText's quantization.

    Args:
      options: of both functions: `method`, `implementation`, `deadline`.
    Raises:
      NotImplementedError: when the model is created: it is quantized, or has experts.
    """
    from flax import linen
    from maxtext.layers import quantizations  # pyright: ignore[reportMissingImports]
    from maxtext.utils import sharding  # pyright: ignore[reportMissingImports]

    class OverlappedDotGeneral(linen.Module):
        kernel_axes: tuple[str | None, ...]

        def __call__(self, x, kernel, dims, **_) -> jax.Array:
            mesh, rules = jax.sharding.get_abstract_mesh(), sharding.get_logical_axis_rules()
            spec = sharding.logical_to_mesh_axes(self.kernel_axes, mesh, rules=rules)
            split = shared_dimension(spec) if x.ndim > 2 else None
            return multiply(x, kernel, dims, split, **options)

    class Overlapped(quantizations.Quantization):
        needs_apply_rngs, quant_mode = False, "train"

        def dot_general_cls(self, mesh_axes=()):
            return functools.partial(OverlappedDotGeneral, kernel_axes=tuple(mesh_axes))

    def configure(config, quant_mode_str="train"):
        for name, usual in (("quantization", ""), ("num_experts", 1)):
            if (value := getattr(config, name)) != usual:
                value = getattr(value, "value", value)  # of an enumeration
                raise NotImplementedError(f"maxtext_gemms: got {name}={value!r}; omit one of them.")
        return Overlapped()

    usual, quantizations.configure_quantization = quantizations.configure_quantization, configure
    try:
        yield
    finally:
        quantizations.configure_quantization = usual
