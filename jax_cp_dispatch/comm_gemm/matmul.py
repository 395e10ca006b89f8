"""`all_gather_matmul` and `matmul_reduce_scatter`: what tensor-parallel layers call."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import Array, Float

from jax_cp_dispatch._ranks.axis import AxisName, other_axes
from jax_cp_dispatch._ranks.entry import find_ranks
from jax_cp_dispatch.comm_gemm import checks
from jax_cp_dispatch.comm_gemm.buffers.config import CommOverlapMethod, CommOverlapType, ScalingMode
from jax_cp_dispatch.comm_gemm.choice.choose import choose_overlaps
from jax_cp_dispatch.comm_gemm.forward_mode import reverse_mode_only
from jax_cp_dispatch.comm_gemm.layers.derivatives import gathered_matmul, scattered_matmul
from jax_cp_dispatch.comm_gemm.layers.global_arrays import matmul_of_all_ranks, product_on_rank
from jax_cp_dispatch.comm_gemm.layers.rank import Matmul
from jax_cp_dispatch.comm_gemm.scaled.operands import FORWARD_DTYPE, MatmulScaling, gradient_dtype

Method = CommOverlapMethod | str
"""A member or its name, "ring" for RING_EXCHANGE, or "auto"."""


def all_gather_matmul(
    x: Float[Array, "*batch T K"],
    w: Float[Array, "K N"],
    *,
    axis_name: AxisName,
    bias: Float[Array, " N"] | None = None,
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
) -> Float[Array, "*batch M N"]:
    """The product of all ranks' tokens with this rank's columns of a weight.

    The first half of a tensor-parallel layer with sequence parallelism: x is split by tokens, w by
    columns. The gathered tokens of a batch stand as one sequence, `[*batch, M, K]`.

    Call inside `jax.shard_map` over `axis_name`, or under plain `jit` on global arrays, x split by
    tokens and w by columns over `axis_name`: then x is `[*batch, M, K]`, w `[K, p N]`, the result
    `[*batch, M, p N]` with its columns split, and batch dimensions keep their sharding.

    Its derivative in x is `matmul_reduce_scatter` with the transposed weight; that in w needs the
    gathered tokens. Reverse mode, any number of times; forward mode is not there.

    Args:
      x: this rank's tokens.
      w: this rank's columns; K is not split.
      axis_name: the mesh axis of the p ranks, or several, the major one first.
      bias: of this rank's columns.
      method: NONE (gather, then multiply), RING_EXCHANGE (multiply a rank's tokens while the next
        ones arrive), or "auto": what `choose_comm_gemm` says. The derivative takes the same.
      atomic: all products are one step of the schedule, which waits for each chunk by a counter;
        else each is a step of its own. On GPUs they stay apart.
      aggregate: chunks move in pairs; an even number of ranks. Not with use_ce=False.
      use_ce: whether the ring copies chunks beside the GEMM; else the GEMM itself reads the tokens
        of other ranks where they are, and nothing is copied but what the derivative keeps.
      buffer: id of `create_comm_overlap_buffer`, whose parameters then hold; otherwise XLA gives
        memory for each call.
      row_counts: tokens of each rank (per batch), where they differ: a rank's x then has room for
        the most, T = max(row_counts), and M = sum(row_counts). Rows behind a rank's own are not
        read. Inside `jax.shard_map` only; global arrays need not divide.
      gathered: whether the derivative keeps the gathered tokens (M K elements), or gathers them
        again, during its GEMMs.
      scaling_mode: how x and w are rounded to 8 bits inside, so that x moves as these, with its
        scales: see `quantize`. x and w become float8_e4m3fn, the gradient of the result
        float8_e5m2, or e4m3fn for MXFP8, which needs K, and for the derivative N, to be multiples
        of 32. In the derivative rounding counts as identity: dx is the product of the rounded
        gradient and weight, dw that of the gathered, rounded tokens and the gradient as it is. Not
        with gathered="again".
      scaling_state: of DELAYED_TENSOR_SCALING; its gradient is the next one: see `MatmulScaling`.
      preferred_element_type: of the result; by default that of x and w.
      mesh: of global arrays, where it is not to be seen otherwise.
      implementation: "in_process", "shared_memory" (between processes of one host), a GPU
        transport by its name, "xla" (the same result from XLA's collectives, without overlap), or
        None: the first that can serve.
      deadline: seconds that a rank waits for another; not with "xla".
    Returns:
      The product: float32 accumulation (float64 for float64), rounded once. Bitwise repeatable.
    Raises:
      TypeError, ValueError: arguments that are not what they need to be.
      jax.errors.JaxRuntimeError: a rank did not come, or did not compute, before the deadline; the
        buffer has been destroyed.
    References:
      Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
      Learning Models", ASPLOS 2023; NVIDIA Transformer Engine, userbuffers.
    """
    op = "all_gather_matmul"
    return _matmul(
        op,
        CommOverlapType.AG,
        (x, w, bias),
        checks.Wish(op, method, None, atomic, False, aggregate, use_ce, buffer),
        axis_name=axis_name,
        row_counts=row_counts,
        gathered=gathered,
        scaling_mode=scaling_mode,
        scaling_state=scaling_state,
        preferred_element_type=preferred_element_type,
        mesh=mesh,
        implementation=implementation,
        deadline=deadline,
    )


def matmul_reduce_scatter(
    x: Float[Array, "*batch M K"],
    w: Float[Array, "K N"],
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
    """This rank's tokens of the sum over ranks of their products.

    The second half of a tensor-parallel layer with sequence parallelism: x is split by columns, w
    by rows, the result by tokens.

    Call inside `jax.shard_map` over `axis_name`, or under plain `jit` on global arrays: then x is
    `[*batch, M, p K]` and w `[p K, N]`, both split over `axis_name` in what is contracted, and the
    result `[*batch, M, N]`, split by tokens.

    Its derivative in x is `all_gather_matmul` with the transposed weight, which also gathers what
    that in w needs. Reverse mode, any number of times; forward mode is not there.

    Args:
      x: all tokens, this rank's columns.
      w: this rank's rows.
      axis_name: the mesh axis of the p ranks, or several, the major one first.
      bias: added once, to the sum; the same on all ranks.
      method: NONE (multiply, then reduce), PIPELINE (reduce columns while the next are multiplied),
        RING_EXCHANGE (send each rank its tokens while the next rank's are multiplied), or "auto":
        what `choose_comm_gemm` says. The derivative takes the same, and the ring for the pipeline.
      num_splits: column chunks of the pipeline; 4 by default.
      atomic: all products are one step of the schedule, which signals each chunk by a counter;
        else each is a step of its own. On GPUs they stay apart. Not with use_ce=False.
      rs_overlap_first_gemm: see `create_comm_overlap_buffer`.
      use_ce: whether the ring copies chunks beside the GEMM; else each rank multiplies its tokens
        of all ranks' x by all their w, where they are, and nothing is copied, nor a partial sum
        stored.
      buffer: id of `create_comm_overlap_buffer`, whose parameters then hold, and whose dtype is
        that of partial sums; otherwise XLA gives memory for each call, for float32 partial sums.
      row_counts: tokens of each rank (per batch), where they differ: M = sum(row_counts), and the
        result has room for the most, T = max(row_counts); rows behind a rank's own are zero. By
        default M is divided evenly. Inside `jax.shard_map` only; global arrays need not divide.
      scaling_mode, scaling_state: see `all_gather_matmul`; here K of one rank is contracted, the
        sums move in float32, and in the derivative the gradient moves as 8 bits.
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
    return _matmul(
        op,
        CommOverlapType.RS,
        (x, w, bias),
        checks.Wish(op, method, num_splits, atomic, rs_overlap_first_gemm, False, use_ce, buffer),
        axis_name=axis_name,
        row_counts=row_counts,
        gathered="keep",
        scaling_mode=scaling_mode,
        scaling_state=scaling_state,
        preferred_element_type=preferred_element_type,
        mesh=mesh,
        implementation=implementation,
        deadline=deadline,
    )


def _matmul(
    op: str,
    kind: CommOverlapType,
    operands,
    wish: checks.Wish,
    *,
    axis_name,
    row_counts,
    gathered,
    scaling_mode,
    scaling_state,
    preferred_element_type,
    mesh,
    implementation,
    deadline,
):
    x, w = (checks.read_array(op, *pair) for pair in zip("xw", operands[:2], strict=True))
    bias = None if operands[2] is None else checks.read_array(op, "bias", operands[2])
    checks.check_arrays(op, x, w, bias)
    if gathered not in ("keep", "again"):
        raise ValueError(f"{op}: gathered is {gathered!r}; it needs to be 'keep' or 'again'.")
    mode = checks.read_scaling(op, scaling_mode, scaling_state, x, w, gathered)
    out_dtype = checks.result_dtype(op, x, w, preferred_element_type)
    checks.check_details(wish)
    comm, place = find_ranks(
        op,
        axis_name,
        [a for a in (x, w, bias) if a is not None],
        mesh=mesh,
        implementation=implementation,
        deadline=deadline,
    )
    names, num_ranks = comm.axis_names, comm.num_ranks
    if not num_ranks:
        raise ValueError(
            f"{op}: no mesh with axis {names[0]!r} is in sight. Call it inside jax.shard_map over "
            f"{names[0]!r}, or on global arrays with mesh= or under jax.set_mesh."
        )
    splits_contracted = place.is_global and kind == CommOverlapType.RS
    contracted = x.shape[-1] // (num_ranks if splits_contracted else 1)
    checks.check_contracted_blocks(op, mode, contracted)
    settings = {
        "op": op,
        "comm": comm,
        "out_dtype": out_dtype,
        "keeps_gathered": gathered == "keep",
        "scaling_mode": mode,
        "dy_dtype": gradient_dtype(mode),
    }

    def product(counts: tuple[int, ...], **where) -> Matmul:
        k, n = w.shape
        if place.is_global:  # of which a rank has a part
            k, n = (k, n // num_ranks) if kind == CommOverlapType.AG else (k // num_ranks, n)
        batches = math.prod(x.shape[:-2])
        rows, room = batches * sum(counts), batches * num_ranks * max(counts)
        if place.is_global:  # of which each group has a part: as examples or tokens are split
            groups = math.prod(place.mesh.shape[a] for a in other_axes(place.mesh, names))
            if rows % groups == room % groups == 0:
                rows, room = rows // groups, room // groups
        forward, backward = choose_overlaps(
            wish,
            kind,
            (rows, k, n),
            x.dtype.name if mode == ScalingMode.NO_SCALING else FORWARD_DTYPE,
            out_dtype,
            num_ranks,
            rows_of_slots=room,
        )
        return Matmul(**settings, row_counts=counts, overlap=forward, backward=backward, **where)

    if place.is_global:
        if row_counts is not None:
            raise ValueError(
                f"{op}: got row_counts with global arrays, which are split evenly, and padded "
                "inside. Leave it away, or call inside jax.shard_map."
            )
        whole = functools.partial(product, mesh=place.mesh)
        with reverse_mode_only(op):
            return matmul_of_all_ranks(op, kind, place, num_ranks, whole, x, w, bias, scaling_state)
    counts = checks.read_row_counts(op, kind, x, num_ranks, row_counts)
    s = product(counts)
    run = gathered_matmul if kind == CommOverlapType.AG else scattered_matmul
    with reverse_mode_only(op):
        return run(*product_on_rank(s, x, w, bias, scaling_state))
