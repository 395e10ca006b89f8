"""A matmul on one rank: its static parts, and the gemms that compute it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch.buffers import CommOverlapConfig, CommOverlapMethod, CommOverlapType
from jax_cp_dispatch.comm_gemm.primitive import GemmCall, GemmOperands, bind_gemm
from jax_cp_dispatch.scaling import (
    BLOCK,
    DelayedScaling,
    Quantized,
    ScalingMode,
    dequantize,
    pad_scales,
    quantize,
    scales_shape,
    unpad_scales,
    unswizzle_scales,
)

FORWARD_DTYPE = "float8_e4m3fn"


class ScaledOperands(NamedTuple):
    """x [..., T, K] and w [K, N] or [N, K] as 8 bits.

    Attributes:
      x, w: with two dimensions, those before the last collapsed.
      like: x as it was given.
    """

    x: Quantized
    w: Quantized
    like: Array

    def operands(self) -> GemmOperands:
        """Returns the operands of a gemm."""
        scales = [
            pad_scales(q.scale_inv, layout=q.layout)
            if q.mode == ScalingMode.MXFP8_1D_SCALING
            else q.scale_inv
            for q in (self.x, self.w)
        ]
        return GemmOperands(self.x.data.reshape(self.like.shape), scales[0], self.w.data, scales[1])

    def values(self, dtype: Any) -> tuple[Array, Array]:
        """Returns the dequantized operands."""
        return dequantize(self.x, dtype).reshape(self.like.shape), dequantize(self.w, dtype)

    def gathered(self, data: Array, tiles: Array | None) -> Array:
        """Dequantizes gathered data [..., M, K]; `tiles` are the swizzled scales of MXFP8."""
        rows_of_all = flat(data)
        scale_inv = self.x.scale_inv
        if tiles is not None:
            shape = scales_shape(rows_of_all.shape, "row")
            scale_inv = unpad_scales(unswizzle_scales(tiles), shape=shape)
        whole = dataclasses.replace(self.x, data=rows_of_all, scale_inv=scale_inv)
        return dequantize(whole, self.like.dtype).reshape(data.shape)


def flat(x: Array) -> Array:
    """Collapses the dimensions before the last."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static parts of a differentiable matmul.

    Attributes:
      op: the public function, for messages.
      comm: the ranks.
      row_counts: see `GemmCall`.
      overlap, backward: how the matmul communicates, and the one in its derivative.
      out_dtype: of the result.
      keeps_gathered: the gathered lhs is kept for the derivative instead of gathered again.
      rhs_transposed: w is [N, K].
      scaling_mode: how x and w become 8 bits; then they have types as follows.
      x_dtype, dy_dtype: 8-bit type of x, and of the result's gradient.
      mesh: of global arrays, which hold the rows of all ranks; None: arrays are one rank's.
    """

    op: str
    comm: Communicator
    row_counts: tuple[int, ...]
    overlap: CommOverlapConfig
    backward: CommOverlapConfig
    out_dtype: str
    keeps_gathered: bool = True
    rhs_transposed: bool = False
    scaling_mode: ScalingMode = ScalingMode.NO_SCALING
    x_dtype: str = FORWARD_DTYPE
    dy_dtype: str = FORWARD_DTYPE
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
            comm=self.comm,
            overlap=self.overlap,
            rhs_transposed=self.rhs_transposed,
            scaling_mode=self.scaling_mode,
            row_counts=self.row_counts,
            num_batches=math.prod(x.shape[:-2]),
        )
        return call.replace(**changes)

    def adjoint(self, out_dtype) -> "Matmul":
        """Returns the matmul that computes dx: w is transposed, and the communication swapped."""
        return self.replace(
            overlap=self.backward,
            backward=self.overlap,
            out_dtype=jnp.dtype(out_dtype).name,
            rhs_transposed=not self.rhs_transposed,
            x_dtype=self.dy_dtype,
            dy_dtype=self.x_dtype,
        )

    def quantize(self, x, w, scales, *, axis_name: Any = None) -> ScaledOperands:
        """Quantizes both operands; `scales` of x and w, f32 [2], are for delayed scaling.

        The ranks of `axis_name` share a current scale of x.
        """
        states = (None, None)
        if scales is not None:
            each = scales[:1], scales[1:2]
            states = tuple(DelayedScaling(amax_history=None, scale=scale) for scale in each)
        mode, layout = self.scaling_mode, "row" if self.rhs_transposed else "column"
        return ScaledOperands(
            quantize(flat(x), mode, dtype=self.x_dtype, state=states[0], axis_name=axis_name),
            quantize(w, mode, dtype=FORWARD_DTYPE, layout=layout, state=states[1]),
            x,
        )

    @property
    def is_scaled(self) -> bool:
        return self.scaling_mode != ScalingMode.NO_SCALING

    @property
    def gathers(self) -> bool:
        """Whether x is gathered; otherwise sums are scattered."""
        return self.overlap.gathers

    @property
    def num_parts(self) -> int:
        """The ranks whose columns the weights hold."""
        return 1 if self.mesh is None else self.comm.num_ranks

    def join(self, ws):
        """Returns several weights of the same x as one, [K, sum of their columns]."""
        return join_columns(ws, self.num_parts)

    def split(self, w, like):
        """Returns the weights in a joined one, or their gradients in its gradient."""
        return tuple(split_columns(w, [each.shape[-1] for each in like], self.num_parts))

    def num_columns(self, w) -> int:
        return w.shape[0 if self.rhs_transposed else 1]


def product_of_rank(s: Matmul, x, w, bias, scales, *, keeps: bool):
    """Returns the product, and the gathered x, as it is multiplied, if it `keeps` that, or None.

    The product has the rows of all ranks, or the largest count of rows; those after a rank's own
    are zero.
    """
    rows = sum(s.row_counts) if s.gathers else max(s.row_counts)
    shape = (*x.shape[:-2], rows, s.num_columns(w))
    if 0 in (*x.shape, *w.shape):  # jaxlib 0.11 crashes on empty arrays
        of_all = (*x.shape[:-2], rows, x.shape[-1])
        out, gathered = vary_alike(
            [jnp.zeros(shape, s.out_dtype), jnp.zeros(of_all, x.dtype)], like=x
        )
        if bias is not None:
            out = jnp.broadcast_to(bias.astype(out.dtype), out.shape)
        return out if s.gathers else real_rows(s, out), gathered if keeps else None
    call = s.call(x, shape, s.out_dtype, gathers_to_aux=keeps, fuse_bias=bias is not None)
    if not s.is_scaled:
        results = bind_gemm(call, GemmOperands(lhs=x, rhs=w, bias=bias))
        return results.output, results.aux_out
    scaled = s.quantize(x, w, scales, axis_name=s.comm.axis_names if s.gathers else None)
    results = bind_gemm(call, scaled.operands()._replace(bias=bias))
    aux = results.aux_out
    return results.output, aux if aux is None else scaled.gathered(aux, results.lhs_swizzled)


def gradients_of_rank(s: Matmul, x, w, dy):
    """Returns dx and dw if the gathered x was not kept; each GEMM hides a transfer.

    x is gathered during dy w', whose result is reduce-scattered during x' dy.
    """
    if 0 in (*x.shape, *w.shape, *dy.shape):  # jaxlib 0.11 crashes on empty arrays
        return jnp.zeros_like(x), jnp.zeros_like(w)
    bulk = lambda kind: CommOverlapConfig(kind, CommOverlapMethod.BULK)
    wide = sum_dtype(x.dtype)
    call = s.call(
        dy,
        (*dy.shape[:-1], x.shape[-1]),
        wide,
        overlap=bulk(CommOverlapType.AG),
        rhs_transposed=not s.rhs_transposed,
    )
    first = bind_gemm(call, GemmOperands(lhs=dy, rhs=w, aux_in=x))
    gathered, partial = first.aux_out, first.output
    lhs, rhs = (dy, gathered) if s.rhs_transposed else (gathered, dy)
    call = s.call(
        lhs,
        w.shape,
        w.dtype,
        overlap=bulk(CommOverlapType.RS),
        rhs_boundary=rhs.ndim - 1,
        lhs_transposed=True,
        rhs_transposed=False,
    )
    second = bind_gemm(call, GemmOperands(lhs=lhs, rhs=rhs, aux_in=partial))
    return second.aux_out.astype(x.dtype), second.output


def real_rows(s: Matmul, dy):
    """Removes the unused rows of ranks with fewer rows."""
    if s.mesh is not None or min(s.row_counts) == max(s.row_counts):
        return dy
    count = jnp.array(s.row_counts)[jax.lax.axis_index(s.comm.axis_names)]
    return jnp.where(jnp.arange(dy.shape[-2])[:, None] < count, dy, 0)


def join_columns(arrays: Sequence[Array], num_parts: int) -> Array:
    """[.., p N_i] of each array to [.., p sum of N_i], in which each part has its own columns."""
    if len(arrays) == 1:
        return arrays[0]
    shapes = [(*a.shape[:-1], num_parts, a.shape[-1] // num_parts) for a in arrays]
    parts = [a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)]
    joined = jnp.concatenate(parts, axis=-1)
    return joined.reshape(*joined.shape[:-2], num_parts * joined.shape[-1])


def split_columns(array: Array, sizes: Sequence[int], num_parts: int) -> list[Array]:
    """The inverse of `join_columns`; `sizes` are the columns of each array, of all parts."""
    if len(sizes) == 1:
        return [array]
    parts = array.reshape(*array.shape[:-1], num_parts, sum(sizes) // num_parts)
    split = jax.lax.split(parts, [n // num_parts for n in sizes], axis=parts.ndim - 1)
    return [a.reshape(*array.shape[:-1], n) for a, n in zip(split, sizes, strict=True)]


def check_contracted_blocks(op: str, mode: ScalingMode, contracted: int) -> None:
    """Requires that a rank contracts whole blocks."""
    if mode == ScalingMode.MXFP8_1D_SCALING and contracted % BLOCK:
        raise ValueError(
            f"{op}: {contracted} elements are contracted on a rank, in the forward pass or in the "
            f"derivative (columns of w); {mode} needs a multiple of {BLOCK}, the elements that "
            "share a scale. Pad with zeros."
        )
