"""`grouped_gemm_p`: a gemm per group of rows, with sizes known only at run time."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.implementations import (
    ON_CPU,
    ON_GPU,
    XLA,
    Operation,
    register_lowering,
)
from jax_cp_dispatch._ranks.lowering import (
    Chosen,
    choose,
    fall_back,
    one_after_another,
    run_alone,
)
from jax_cp_dispatch.comm_gemm.engine.custom_call import load_blas, threads_per_device
from jax_cp_dispatch.comm_gemm.types import ScalingMode

grouped_gemm_p = Primitive("grouped_gemm")


@dataclasses.dataclass(frozen=True)
class GroupedCall:
    """The static parts of a grouped gemm.

    Attributes:
      out_dtype: of the output.
      contracts_rows: lhs [M, K] and rhs [M, N] give [G, K, N]; else lhs [M, K] and a matrix per
        group give [M, N].
      rhs_transposed: the matrices are [G, N, K], not [G, K, N].
      scaling_mode: how operands are scaled.
      fuse_bias: a bias is added.
      implementation: None, "in_process" or "xla".
    """

    out_dtype: str
    contracts_rows: bool = False
    rhs_transposed: bool = False
    scaling_mode: ScalingMode = ScalingMode.NO_SCALING
    fuse_bias: bool = False
    implementation: str | None = None

    @property
    def comm(self) -> Communicator:
        """No ranks, but the caller's choice."""
        return Communicator(implementation=self.implementation)

    def replace(self, **changes: Any) -> "GroupedCall":
        return dataclasses.replace(self, **changes)

    def out_shape(self, lhs, rhs, group_sizes) -> tuple[int, ...]:
        if self.contracts_rows:
            return (group_sizes.shape[0], lhs.shape[1], rhs.shape[1])
        return (lhs.shape[0], rhs.shape[1 if self.rhs_transposed else 2])


class GroupedOperands(NamedTuple):
    """Operands of the handler; those that are not used have one element."""

    lhs: Any
    lhs_scale_inv: Any
    rhs: Any
    rhs_scale_inv: Any
    bias: Any
    group_sizes: Any


def _shape(*operands, call: GroupedCall):
    given = GroupedOperands(*operands)
    shape = call.out_shape(given.lhs, given.rhs, given.group_sizes)
    return given.lhs.update(shape=shape, dtype=jnp.dtype(call.out_dtype), weak_type=False)


def _lower(ctx, *operands, call: GroupedCall):
    choice = choose(ctx, "grouped_gemm", call.comm)
    return choice.lower(Operation.GROUPED_GEMM, ctx, *operands, call=call)


def _lower_on_cpu(ctx, *operands, call: GroupedCall, choice: Chosen):
    load_blas()
    return jax.ffi.ffi_lowering(runtime.GROUPED_GEMM_TARGET)(
        ctx,
        *operands,
        op="grouped_gemm",
        num_threads=np.int64(threads_per_device()),
        scaling_mode=np.int64(call.scaling_mode),
        contracts_rows=call.contracts_rows,
        rhs_transposed=call.rhs_transposed,
        fuse_bias=call.fuse_bias,
    )


def _lower_on_gpu(ctx, *operands, call: GroupedCall, choice: Chosen):
    missing = "grouped products on GPUs are XLA's ragged_dot, without a host's synchronisation"
    by_xla = fall_back(choice, "grouped_gemm", call.comm, missing)
    return by_xla.lower(Operation.GROUPED_GEMM, ctx, *operands, call=call)


def _lower_by_xla(ctx, *operands, call: GroupedCall, choice: Chosen):
    by_xla = functools.partial(grouped_gemm_by_xla, call=call)
    return mlir.lower_fun(by_xla, multiple_results=False)(ctx, *operands)


register_lowering(Operation.GROUPED_GEMM, _lower_on_cpu, on=ON_CPU)
register_lowering(Operation.GROUPED_GEMM, _lower_on_gpu, on=ON_GPU)
register_lowering(Operation.GROUPED_GEMM, _lower_by_xla, on=[XLA])


def grouped_gemm_by_xla(*operands, call: GroupedCall):
    """Computes a grouped gemm with `jax.lax.ragged_dot_general`."""
    lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, group_sizes = GroupedOperands(*operands)
    wide = sum_dtype(call.out_dtype)
    num_rows, num_groups = lhs.shape[0], group_sizes.shape[0]
    is_row = jnp.arange(num_rows)[:, None] < group_sizes.sum()
    of_rows = lambda x: jnp.repeat(x, group_sizes, axis=0, total_repeat_length=num_rows)
    if call.scaling_mode != ScalingMode.NO_SCALING:
        lhs = lhs.astype(wide) * of_rows(lhs_scale_inv)[:, None]
        rhs_scale = of_rows(rhs_scale_inv) if call.contracts_rows else rhs_scale_inv
        rhs = rhs.astype(wide) * rhs_scale.reshape(-1, *[1] * (rhs.ndim - 1))
    contracted = ((0,), (0,)) if call.contracts_rows else ((1,), (2 if call.rhs_transposed else 1,))
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[] if call.contracts_rows else [0],
    )
    is_exact = max(lhs.dtype.itemsize, rhs.dtype.itemsize) < 4  # in float32; Mosaic refuses HIGHEST
    product = lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        numbers,
        precision=None if is_exact else lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )
    if call.contracts_rows:
        return product.reshape(num_groups, lhs.shape[1], rhs.shape[1]).astype(call.out_dtype)
    if call.fuse_bias:
        product = product + of_rows(bias.astype(wide))
    return jnp.where(is_row, product, 0).astype(call.out_dtype)


grouped_gemm_p.def_abstract_eval(_shape)
grouped_gemm_p.def_impl(functools.partial(run_alone, grouped_gemm_p))
mlir.register_lowering(grouped_gemm_p, _lower)
batching.primitive_batchers[grouped_gemm_p] = functools.partial(one_after_another, grouped_gemm_p)


def _no_derivative(primals, tangents, *, call: GroupedCall):
    raise NotImplementedError(
        f"grouped_gemm: no derivative is defined with {call.scaling_mode}. Quantize inside a "
        "function whose derivative you define, or differentiate it with NO_SCALING (reverse mode)."
    )


ad.primitive_jvps[grouped_gemm_p] = _no_derivative
