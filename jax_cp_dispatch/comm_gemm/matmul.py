"""`all_gather_matmul` and `matmul_reduce_scatter`, for tensor-parallel layers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import jax
from jaxtyping import Array, Float

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.communicator import AxisName, Communicator, other_axes
from jax_cp_dispatch._ranks.options import CallContext, CollectiveOptions, find_ranks, read_options
from jax_cp_dispatch.comm_gemm.choice import (
    MatmulSizes,
    OverlapOptions,
    check_details,
    choose_overlaps,
)
from jax_cp_dispatch.comm_gemm.derivatives import (
    even_row_counts,
    global_matmul,
    over_explicit_axes,
    rank_matmul,
)
from jax_cp_dispatch.comm_gemm.matmul_operands import MatmulOperands, read_operands, read_row_counts
from jax_cp_dispatch.comm_gemm.rank import Matmul
from jax_cp_dispatch.comm_gemm.scaled_operands import (
    FORWARD_DTYPE,
    MatmulScaling,
    check_contracted_blocks,
    gradient_dtype,
    read_scaling,
)
from jax_cp_dispatch.comm_gemm.types import (
    CommOverlapMethod,
    CommOverlapType,
    ScalingMode,
    result_dtype,
    reverse_mode_only,
)

Method = CommOverlapMethod | str
"""A member or its name, "ring" for RING_EXCHANGE, or "auto"."""

_Arrays = TypeVar("_Arrays", Float[Array, "..."], tuple[Any, ...])
"""One array, or several, whose shapes may differ."""


def all_gather_matmul(
    x: Float[Array, "*batch T K"],
    w: _Arrays,
    *,
    axis_name: AxisName,
    bias: Float[Array, "*N"] | tuple[Float[Array, "..."] | None, ...] | None = None,
    method: Method = "auto",
    atomic: bool = False,
    aggregate: bool = False,
    use_ce: bool | None = None,
    buffer: int | None = None,
    row_counts: Sequence[int] | None = None,
    gathered: Literal["keep", "again"] = "keep",
    scaling_mode: ScalingMode | str = ScalingMode.NO_SCALING,
    scaling_state: MatmulScaling | None = None,
    preferred_element_type: Any = None,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> _Arrays:
    """Multiplies all ranks' tokens with this rank's columns of a weight, or of several.

    The first half of a tensor-parallel layer with sequence parallelism: x is sharded by tokens, w
    by columns. The gathered tokens of a batch form one sequence, `[*batch, M, K]`. Several weights
    of the same x, such as those of q, k and v, gather it once.

    Call inside `jax.shard_map` over `axis_name`, or under plain `jit` on global arrays, with x
    sharded by tokens and w by columns over `axis_name`. For global arrays, x is `[*batch, M, K]`, w
    is `[K, p N]`, and the result is `[*batch, M, p N]`, sharded by columns. Batch dimensions keep
    their sharding.

    Its derivative in x is `matmul_reduce_scatter` with the transposed weight, one product for
    several weights; the derivative in w needs the gathered tokens. Supports reverse mode, any
    number of times, but not forward mode.

    Args:
      x: this rank's tokens, `[*batch, T, K]`.
      w: this rank's columns, [K, N] or [K, N, H] (heads and their features, for example), or a
        tuple of such weights, of one dtype. K is not sharded. Of the columns of global arrays, the
        first dimension is sharded.
      axis_name: the mesh axis of the p ranks, or several, the major one first.
      bias: one element per column of this rank, [N] or [N, H]; for several weights a tuple of
        biases or None.
      method: NONE (gather, then multiply), RING_EXCHANGE (multiply a rank's tokens while the next
        ones arrive), or "auto" (the choice of `choose_comm_gemm`). The derivative uses the same.
      atomic: run all GEMMs as one step of the schedule, which waits for each chunk by a counter;
        otherwise each is a separate step. On GPUs they stay separate.
      aggregate: move chunks in pairs; needs an even number of ranks, and use_ce.
      use_ce: whether the ring copies chunks while the GEMM runs; otherwise the GEMM reads other
        ranks' tokens in place, and only tokens kept for the derivative are copied.
      buffer: id of `create_comm_overlap_buffer`, whose parameters then apply. Without it, XLA
        allocates memory for each call.
      row_counts: tokens of each rank (per batch), if they differ. Each rank's x then has T =
        max(row_counts) rows, and M = sum(row_counts). Rows after a rank's own are not read. Only
        inside `jax.shard_map`; global arrays are padded internally.
      gathered: "keep" stores the gathered tokens (M K elements) for the derivative; "again" gathers
        them again during its GEMMs.
      scaling_mode: quantizes x and w to 8 bits internally, so that x moves in 8 bits with its
        scales; see `quantize`. x and w become float8_e4m3fn. The gradient of the result becomes
        float8_e5m2, or e4m3fn for MXFP8, which needs K, and for the derivative N, to be multiples
        of 32. The derivative treats rounding as identity: dx is the product of the rounded gradient
        and weight; dw is the product of the gathered, rounded tokens and the unrounded gradient.
        Not with gathered="again". Several weights have one tensor scale.
      scaling_state: the state of DELAYED_TENSOR_SCALING; its gradient is the next state, see
        `MatmulScaling`.
      preferred_element_type: dtype of the result; by default that of x and w.
      mesh: the mesh of global arrays, if it cannot be inferred.
      implementation: "in_process", "shared_memory" (between processes of one host), the name of a
        GPU transport, "xla" (the same result with XLA's collectives, without overlap), or None for
        the first that is available.
      deadline: seconds that a rank waits for another; no effect with "xla".
    Returns:
      The product `[*batch, M, N]` or `[*batch, M, N, H]`, accumulated in float32 (float64 for
      float64) and rounded once; a tuple of products for a tuple of weights. Bitwise repeatable.
    Raises:
      TypeError, ValueError: an argument is invalid.
      jax.errors.JaxRuntimeError: a rank did not arrive or did not compute before the deadline, or
        the buffer has been destroyed.
    References:
      Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
      Learning Models", ASPLOS 2023; NVIDIA Transformer Engine, userbuffers.
    """
    op = "all_gather_matmul"
    products: Any = _matmul(
        op,
        CommOverlapType.AG,
        read_operands(op, CommOverlapType.AG, x, w, bias),
        scaling_state,
        OverlapOptions(
            method=method, atomic=atomic, aggregate=aggregate, use_ce=use_ce, buffer=buffer
        ),
        _MatmulOptions(
            ranks=read_options(op, axis_name, mesh, implementation, deadline),
            row_counts=row_counts,
            gathered=gathered,
            scaling_mode=scaling_mode,
            preferred_element_type=preferred_element_type,
        ),
    )
    return products if isinstance(w, tuple) else products[0]


def matmul_reduce_scatter(
    x: Float[Array, "..."],
    w: Float[Array, "*K N"],
    *,
    axis_name: AxisName,
    bias: Float[Array, " N"] | None = None,
    method: Method = "auto",
    num_splits: int | None = None,
    atomic: bool = False,
    rs_overlap_first_gemm: bool = False,
    use_ce: bool | None = None,
    buffer: int | None = None,
    row_counts: Sequence[int] | None = None,
    scaling_mode: ScalingMode | str = ScalingMode.NO_SCALING,
    scaling_state: MatmulScaling | None = None,
    preferred_element_type: Any = None,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Float[Array, "*batch T N"]:
    """Sums the products of all ranks, and returns this rank's tokens of the sum.

    The second half of a tensor-parallel layer with sequence parallelism: x is sharded by columns, w
    by rows, the result by tokens.

    Call inside `jax.shard_map` over `axis_name`, or under plain `jit` on global arrays. For global
    arrays, x is `[*batch, M, p K]` and w is `[p K, N]`, both sharded over `axis_name` along the
    contracted dimension; the result is `[*batch, M, N]`, sharded by tokens.

    Its derivative in x is `all_gather_matmul` with the transposed weight, which also gathers the
    tokens for the derivative in w. Supports reverse mode, any number of times, but not forward
    mode.

    Args:
      x: this rank's columns of all tokens, `[*batch, M, K]` or `[*batch, M, K, H]` (heads and their
        features, for example).
      w: this rank's rows, [K, N] or [K, H, N]. All its dimensions but the last are contracted. Of
        those of global arrays, the first is sharded.
      axis_name: the mesh axis of the p ranks, or several, the major one first.
      bias: added once to the sum; the same on all ranks.
      method: NONE (multiply, then reduce), PIPELINE (reduce columns while the next are multiplied),
        RING_EXCHANGE (send each rank its tokens while the next rank's are multiplied), or "auto"
        (the choice of `choose_comm_gemm`). The derivative uses the same, but the ring instead of
        the pipeline.
      num_splits: number of column chunks of the pipeline; 4 by default.
      atomic: run all GEMMs as one step of the schedule, which signals each chunk by a counter;
        otherwise each is a separate step. On GPUs they stay separate. Not with use_ce=False.
      rs_overlap_first_gemm: see `create_comm_overlap_buffer`.
      use_ce: whether the ring copies chunks while the GEMM runs; otherwise each rank multiplies its
        tokens of all ranks' x by all their w in place, without copies or stored partial sums.
      buffer: id of `create_comm_overlap_buffer`, whose parameters then apply; its dtype is that of
        partial sums. Without it, XLA allocates memory for each call, for float32 partial sums.
      row_counts: tokens of each rank (per batch), if they differ: M = sum(row_counts), and the
        result has T = max(row_counts) rows; rows after a rank's own are zero. By default M is
        divided evenly. Only inside `jax.shard_map`; global arrays are padded internally.
      scaling_mode, scaling_state: see `all_gather_matmul`. Here K of one rank is contracted, sums
        move in float32, and in the derivative the gradient moves in 8 bits.
      preferred_element_type, mesh, implementation, deadline: see `all_gather_matmul`.
    Returns:
      The product, summed in float32 (float64 for float64) in the order of the ranks, rounded once.
      Bitwise repeatable.
    Raises:
      TypeError, ValueError, jax.errors.JaxRuntimeError: see `all_gather_matmul`.
    References:
      See `all_gather_matmul`.
    """
    op = "matmul_reduce_scatter"
    (product,) = _matmul(
        op,
        CommOverlapType.RS,
        read_operands(op, CommOverlapType.RS, x, w, bias),
        scaling_state,
        OverlapOptions(
            method=method,
            num_splits=num_splits,
            atomic=atomic,
            rs_overlap_first_gemm=rs_overlap_first_gemm,
            use_ce=use_ce,
            buffer=buffer,
        ),
        _MatmulOptions(
            ranks=read_options(op, axis_name, mesh, implementation, deadline),
            row_counts=row_counts,
            scaling_mode=scaling_mode,
            preferred_element_type=preferred_element_type,
        ),
    )
    return product


# ---- Both.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MatmulOptions:
    """The caller's options besides operands and overlap; see `all_gather_matmul`."""

    ranks: CollectiveOptions
    row_counts: Sequence[int] | None
    gathered: str = "keep"
    scaling_mode: Any
    preferred_element_type: Any


def _matmul(
    op: str,
    kind: CommOverlapType,
    operands: MatmulOperands,
    state: MatmulScaling | None,
    overlap: OverlapOptions,
    options: _MatmulOptions,
) -> tuple[Array, ...]:
    x, w = operands.x, operands.ws[0]
    if options.gathered not in ("keep", "again"):
        raise ValueError(
            f"{op}: gathered is {options.gathered!r}; it needs to be 'keep' or 'again'."
        )
    mode = read_scaling(op, options.scaling_mode, state, x, w, options.gathered)
    out_dtype = result_dtype(op, x, w, options.preferred_element_type)
    check_details(op, overlap)
    comm, context = find_ranks(options.ranks, jax.tree.leaves(operands))
    p = comm.num_ranks
    if not p:
        name = comm.axis_names[0]
        raise ValueError(
            f"{op}: no mesh with axis {name!r} was found. Call it inside jax.shard_map over "
            f"{name!r}, or on global arrays with mesh= or under jax.set_mesh."
        )
    if not context.is_global:
        run = lambda operands, state: _matmul(op, kind, operands, state, overlap, options)
        outs = over_explicit_axes(run, operands, state)
        if outs is not None:
            return outs
    if context.is_global and options.row_counts is not None:
        raise ValueError(
            f"{op}: got row_counts with global arrays, which are split evenly and padded. "
            "Omit it, or call inside jax.shard_map."
        )
    k, n = operands.sizes
    if context.is_global:  # each rank has a part
        k, n = (k, n // p) if kind == CommOverlapType.AG else (k // p, n)
        counts = even_row_counts(operands.tokens_shape[-1], p)
    else:
        counts = read_row_counts(op, kind, operands, p, options.row_counts)
    check_contracted_blocks(op, mode, k)
    rows, slot_rows = _group_rows(operands, counts, comm, context)
    sizes = MatmulSizes(
        comm_type=kind,
        m=rows,
        k=k,
        n=n,
        slot_rows=slot_rows,
        num_ranks=p,
        dtype=x.dtype.name if mode == ScalingMode.NO_SCALING else FORWARD_DTYPE,
        sum_dtype=sum_dtype(out_dtype).name,
    )
    forward, backward = choose_overlaps(op, overlap, sizes)
    s = Matmul(
        op=op,
        comm=comm,
        row_counts=counts,
        overlap=forward,
        backward=backward,
        out_dtype=out_dtype,
        keeps_gathered=options.gathered == "keep",
        scaling_mode=mode,
        dy_dtype=gradient_dtype(mode),
        mesh=context.mesh if context.is_global else None,
    )
    with reverse_mode_only(op):
        if context.is_global:
            return global_matmul(s, context, operands, state)
        return rank_matmul(s, operands, state)


def _group_rows(
    operands: MatmulOperands, counts: tuple[int, ...], comm: Communicator, context: CallContext
) -> tuple[int, int]:
    """Returns the rows of one group: their number, and that with equal slots on all ranks."""
    batches = math.prod(operands.tokens_shape[:-1])
    rows, room = batches * sum(counts), batches * comm.num_ranks * max(counts)
    if context.is_global:  # split over groups, by examples or by tokens
        mesh = context.mesh
        groups = math.prod(mesh.shape[a] for a in other_axes(mesh, comm.axis_names))
        if rows % groups == room % groups == 0:
            rows, room = rows // groups, room // groups
    return rows, room
