"""A matmul on one rank: its static parts, and the gemms that compute it."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._jax_private import parse_flatten_op_sharding
from jax_cp_dispatch._ranks.communicator import Communicator, other_axes
from jax_cp_dispatch._ranks.lowering import partitioned
from jax_cp_dispatch._ranks.options import vary_like, varying_axes
from jax_cp_dispatch._text import say_once
from jax_cp_dispatch.comm_gemm.call import GemmCall, Overlap
from jax_cp_dispatch.comm_gemm.lowering import bind_gemm
from jax_cp_dispatch.comm_gemm.matmul_operands import join_columns, split_columns
from jax_cp_dispatch.comm_gemm.quantize import DelayedScaling, quantize
from jax_cp_dispatch.comm_gemm.scaled_operands import (
    FORWARD_DTYPE,
    ScaledOperands,
    dequantize_gathered,
    flat,
)
from jax_cp_dispatch.comm_gemm.types import CommOverlapMethod, CommOverlapType, ScalingMode


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
    overlap: Overlap
    backward: Overlap
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
            x.shape,
        )

    @property
    def is_scaled(self) -> bool:
        return self.scaling_mode != ScalingMode.NO_SCALING

    def varying_axes(self) -> frozenset[str]:
        """The axes of the ranks, if JAX tracks over which axes arrays vary."""
        places = (jax.lax.axis_index(name) for name in self.comm.axis_names)
        return frozenset().union(*map(varying_axes, places))

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


def gather_rows(s: Matmul, x, w, bias, scales, *, gathers_to_aux: bool):
    """Result [..., sum of the row counts, N], and the gathered x, as it is multiplied, or None."""
    shape = (*x.shape[:-2], sum(s.row_counts), s.num_columns(w))
    call = s.call(x, shape, s.out_dtype, gathers_to_aux=gathers_to_aux, fuse_bias=bias is not None)
    if 0 in (*x.shape, *w.shape, *shape):
        shape = (*x.shape[:-2], sum(s.row_counts), x.shape[-1])
        (gathered,) = vary_like([jnp.zeros(shape, x.dtype)], x)
        return _empty_sum(call, x, bias), gathered if gathers_to_aux else None
    if not s.is_scaled:
        results = bind_gemm(call, lhs=x, rhs=w, bias=bias)
        return results.output, results.aux_out
    scaled = s.quantize(x, w, scales, axis_name=s.comm.axis_names)
    results = bind_gemm(call, **scaled.operands(), bias=bias)
    aux = results.aux_out
    if aux is not None:
        aux = dequantize_gathered(aux, results.lhs_swizzled, scaled.x, x.dtype)
    return results.output, aux


def scatter_rows(s: Matmul, x, w, bias, scales):
    """Result [..., largest row count, N]."""
    shape = (*x.shape[:-2], max(s.row_counts), s.num_columns(w))
    call = s.call(x, shape, s.out_dtype, fuse_bias=bias is not None)
    if 0 in (*x.shape, *w.shape):
        return real_rows(s, _empty_sum(call, x, bias))
    operands = s.quantize(x, w, scales).operands() if s.is_scaled else {"lhs": x, "rhs": w}
    return bind_gemm(call, **operands, bias=bias).output


def gather_rows_again(s: Matmul, x, w, dy):
    """Returns dx and dw if the gathered x was not kept; each GEMM hides a transfer.

    x is gathered during dy w', whose result is reduce-scattered during x' dy.
    """
    if 0 in (*x.shape, *w.shape, *dy.shape):  # jaxlib 0.11 crashes on empty arrays
        return jnp.zeros_like(x), jnp.zeros_like(w)
    bulk = lambda kind: Overlap(comm_type=kind, method=CommOverlapMethod.BULK)
    wide = sum_dtype(x.dtype)
    call = s.call(
        dy,
        (*dy.shape[:-1], x.shape[-1]),
        wide,
        overlap=bulk(CommOverlapType.AG),
        rhs_transposed=not s.rhs_transposed,
    )
    first = bind_gemm(call, lhs=dy, rhs=w, aux_in=x)
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
    second = bind_gemm(call, lhs=lhs, rhs=rhs, aux_in=partial)
    return second.aux_out.astype(x.dtype), second.output


def _empty_sum(call: GemmCall, x, bias):
    """Returns an empty sum, since jaxlib 0.11 crashes on empty arrays."""
    zeros = vary_like([jnp.zeros(call.out_shape, call.out_dtype)], x)[0]
    return zeros if bias is None else jnp.broadcast_to(bias.astype(zeros.dtype), zeros.shape)


def real_rows(s: Matmul, dy):
    """Removes the unused rows of ranks with fewer rows."""
    if s.mesh is not None or min(s.row_counts) == max(s.row_counts):
        return dy
    count = jnp.array(s.row_counts)[jax.lax.axis_index(s.comm.axis_names)]
    return jnp.where(jnp.arange(dy.shape[-2])[:, None] < count, dy, 0)


# ---- Matmuls over all ranks: derivatives, global arrays, other axes.


# ---- Tokens of global arrays that are sharded over more mesh axes than the ranks'.
#
# A Shardy rule states which dimensions are sharded alike. It cannot state "as x, and also over the
# ranks", because only the compiler knows over how many devices x is sharded. Small unused arrays
# convey it: one for each possible number of devices of the other mesh axes, each sharded over the
# ranks only after that number. All of them start alike, and the longest match applies.


def keeps_token_axes(s: Matmul, x) -> bool:
    """Whether tokens of x may be sharded over other mesh axes too, and stay so."""
    is_even = min(s.row_counts) == max(s.row_counts) > 0
    return is_even and x.shape[-1] > 0 and bool(other_axes(s.mesh, s.comm.axis_names))


def dim_axes(sharding: Any, mesh: Any, num_dims: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes over which each dimension is sharded, major axis first.

    A sharding that mesh axes cannot describe (half of one, for example) counts as none.
    """
    try:
        (spec,) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(num_dims), mesh)
    except (ValueError, NotImplementedError, StopIteration):
        spec = ()
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return axes + [()] * (num_dims - len(axes))


def split_tokens(s: Matmul, x):
    """Returns an array [*batch, M] sharded as x, and then over the ranks."""
    *batch, rows, _ = x.shape
    p = s.comm.num_ranks
    sizes = [s.mesh.shape[name] for name in other_axes(s.mesh, s.comm.axis_names)]
    subsets = (c for k in range(len(sizes) + 1) for c in itertools.combinations(sizes, k))
    thin = (x[..., 0] != 0).astype(jnp.int8)
    ranks = _ranks_behind(s, x)[:, None]
    total = jnp.zeros_like(thin)
    for devices in sorted({math.prod(subset) for subset in subsets}):
        if rows % (devices * p) == 0:
            # If x is sharded over more devices, the third dimension already has an axis, which
            # Shardy keeps. If over fewer, the second dimension is not full.
            parts = thin.reshape(*batch, devices, p, rows // (devices * p))
            ranks_of = jnp.broadcast_to(ranks, parts.shape)
            total = total + (parts + ranks_of).reshape(thin.shape)
    return total


def _ranks_behind(s: Matmul, x):
    """Returns an array [p] sharded over the ranks; the compiler learns this after x."""
    dims = " ".join(f"d{i}" for i in range(x.ndim))
    ranks = jnp.zeros(s.comm.num_ranks, jnp.int8)
    of_ranks = NamedSharding(s.mesh, P(s.comm.axis_names))
    ranks = jax.lax.with_sharding_constraint(ranks, of_ranks)
    return _keep_first(ranks, x, f"r, {dims} -> r")


def split_like(array, like, num_dims: int):
    """Shards the first dimensions of an array like those of another one."""
    shared = [f"d{i}" for i in range(num_dims)]
    dims = " ".join([*shared, *(f"k{i}" for i in range(num_dims, array.ndim))])
    others = " ".join([*shared, *(f"n{i}" for i in range(num_dims, like.ndim))])

    @custom_vmap
    def run(array, like):
        return _keep_first(array, like, f"{dims}, {others} -> {dims}")

    @run.def_vmap
    def _(size, is_mapped, *arrays):
        array, like = (
            a if flag else jnp.broadcast_to(a, (size, *a.shape))
            for a, flag in zip(arrays, is_mapped, strict=True)
        )
        return split_like(array, like, num_dims + 1), True

    return run(array, like)


def _keep_first(array, other, rule: str):
    first = lambda array, other: [array]

    def partition(mesh, arguments, results):
        to = results[0].sharding
        return mesh, first, [to], (to, arguments[1].sharding)

    # On TPUs XLA shards as it sees fit.
    rules = {"sharding_rule": rule, "decode_shardings": False}
    return partitioned(first, partition, name=rule, on_tpus=first, **rules)(array, other)[0]


def tell_lost_axes(s: Matmul, axes: tuple[str, ...], why: str) -> None:
    """Warns once about the axes of tokens that XLA gathers."""
    ranks = s.comm.axis_names
    say_once(
        f"{s.op}: tokens are split over {axes} besides axis_name {ranks}, and XLA gathers them "
        f"over {axes}: {why}. Call inside jax.shard_map, reshape tokens to a dimension of {axes} "
        f"and one of {ranks}, or split them over {(*axes, *ranks)}, and constrain the result with "
        "jax.lax.with_sharding_constraint."
    )
