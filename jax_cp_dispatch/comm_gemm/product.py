"""A tensor-parallel product on one rank: its static parts, and the call that computes it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_cp_dispatch._varying import vary_like, varying_axes
from jax_cp_dispatch.comm_gemm.call import GemmCall, Overlap
from jax_cp_dispatch.comm_gemm.primitive import bind_gemm


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static parts of a differentiable product on one rank.

    Attributes:
      op: the public function, for messages.
      axis_names, group_axes, open_axes, num_ranks, row_counts, implementation, deadline_ms: see
        `GemmCall`.
      overlap, backward: how the product communicates, and the one in its derivative.
      out_dtype: of the result.
      keeps_gathered: the gathered lhs is kept for the derivative, rather than gathered again.
      rhs_transposed: w is [N, K].
      mesh: of global arrays, which hold the rows of all ranks; None: arrays are one rank's.
    """

    op: str
    axis_names: tuple[str, ...]
    num_ranks: int
    row_counts: tuple[int, ...]
    overlap: Overlap
    backward: Overlap
    out_dtype: str
    group_axes: tuple[str, ...] = ()
    open_axes: tuple[str, ...] = ()
    keeps_gathered: bool = True
    rhs_transposed: bool = False
    implementation: str | None = None
    deadline_ms: int = 60_000
    mesh: Any = None

    def replace(self, **changes: Any) -> "Matmul":
        return dataclasses.replace(self, **changes)

    def call(self, x, out_shape, out_dtype, **changes) -> GemmCall:
        call = GemmCall(
            op=self.op,
            lhs_boundary=x.ndim - 1,
            rhs_boundary=1,
            out_shape=out_shape,
            out_dtype=jnp.dtype(out_dtype).name,
            axis_names=self.axis_names,
            group_axes=self.group_axes,
            open_axes=self.open_axes,
            num_ranks=self.num_ranks,
            overlap=self.overlap,
            rhs_transposed=self.rhs_transposed,
            row_counts=self.row_counts,
            num_batches=math.prod(x.shape[:-2]),
            implementation=self.implementation,
            deadline_ms=self.deadline_ms,
        )
        return call.replace(**changes)

    def adjoint(self, out_dtype) -> "Matmul":
        """The product that gives dx: with w transposed, and the other communication."""
        return self.replace(
            overlap=self.backward,
            backward=self.overlap,
            out_dtype=jnp.dtype(out_dtype).name,
            rhs_transposed=not self.rhs_transposed,
        )

    def varying_axes(self) -> frozenset[str]:
        """The axes of the ranks where JAX tracks over which ones an array varies."""
        places = (jax.lax.axis_index(name) for name in self.axis_names)
        return frozenset().union(*map(varying_axes, places))

    def num_columns(self, w) -> int:
        return w.shape[0 if self.rhs_transposed else 1]


def gather_rows_of_rank(s: Matmul, x, w, bias, *, gathers_to_aux: bool):
    """Result [..., sum of the row counts, N], and the gathered x or None."""
    shape = (*x.shape[:-2], sum(s.row_counts), s.num_columns(w))
    call = s.call(x, shape, s.out_dtype, gathers_to_aux=gathers_to_aux, fuse_bias=bias is not None)
    if 0 in (*x.shape, *w.shape):
        shape = (*x.shape[:-2], sum(s.row_counts), x.shape[-1])
        (gathered,) = vary_like([jnp.zeros(shape, x.dtype)], x)
        return _of_nothing(call, x, bias), gathered if gathers_to_aux else None
    results = bind_gemm(call, lhs=x, rhs=w, bias=bias)
    return results.output, results.aux_out


def scatter_rows_of_rank(s: Matmul, x, w, bias):
    """Result [..., largest row count, N]."""
    shape = (*x.shape[:-2], max(s.row_counts), s.num_columns(w))
    call = s.call(x, shape, s.out_dtype, fuse_bias=bias is not None)
    if 0 in (*x.shape, *w.shape):
        return _of_nothing(call, x, bias)
    return bind_gemm(call, lhs=x, rhs=w, bias=bias).output


def _of_nothing(call: GemmCall, x, bias):
    """An empty sum: jaxlib 0.11 crashes on what has no element."""
    zeros = vary_like([jnp.zeros(call.out_shape, call.out_dtype)], x)[0]
    return zeros if bias is None else zeros + bias.astype(call.out_dtype)
