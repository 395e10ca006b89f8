"""`all_gather_matmul` and `matmul_reduce_scatter`, for tensor-parallel layers."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.communicator import AxisName, axes_of, other_axes
from jax_cp_dispatch._ranks.options import (
    CallContext,
    find_ranks,
    place,
    read_options,
    refuse_mapped_explicit_axes,
    refuse_other_mesh,
    vary_alike,
    varying_axes,
)
from jax_cp_dispatch.buffers import CommOverlapMethod
from jax_cp_dispatch.comm_gemm.arguments import (
    MatmulOptions,
    check_operand_types,
    choose_overlaps,
    read_arrays,
    result_dtype,
    reverse_mode_only,
)
from jax_cp_dispatch.comm_gemm.derivatives import matmul, use_scales
from jax_cp_dispatch.comm_gemm.rank import (
    FORWARD_DTYPE,
    Matmul,
    check_contracted_blocks,
    dividing_axes,
    pad_rows,
)
from jax_cp_dispatch.cost import CommGemmShape
from jax_cp_dispatch.global_call import MeshAxes, explicit_axes, on_all_ranks
from jax_cp_dispatch.scaling import MatmulScaling, ScalingMode

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
      use_ce: of the ring. True, or None: chunks are copied while the GEMM runs. False: the GEMM
        reads other ranks' tokens in their memory; only those kept for the derivative are copied.
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
    options = MatmulOptions(
        ranks=read_options("all_gather_matmul", axis_name, mesh, implementation, deadline),
        row_counts=row_counts,
        gathered=gathered,
        scaling_mode=scaling_mode,
        preferred_element_type=preferred_element_type,
        method=method,
        atomic=atomic,
        aggregate=aggregate,
        use_ce=use_ce,
        buffer=buffer,
    )
    products: Any = _matmul(options, _read_operands(options, x, w, bias), scaling_state)
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
      bias: [N], added once to the sum; the same on all ranks.
      method: NONE (multiply, then reduce), PIPELINE (reduce columns while the next are multiplied),
        RING_EXCHANGE (send each rank its tokens while the next rank's are multiplied), or "auto"
        (the choice of `choose_comm_gemm`). The derivative uses the same, but the ring instead of
        the pipeline.
      num_splits: number of column chunks of the pipeline; 4 by default.
      atomic: run all GEMMs as one step of the schedule, which signals each chunk by a counter;
        otherwise each is a separate step. On GPUs they stay separate. Not with use_ce=False.
      rs_overlap_first_gemm: see `create_comm_overlap_buffer`.
      use_ce: of the ring. True, or None: partial sums are copied while the GEMM runs. False: each
        rank reads the x of its tokens, and w, in the memory of all ranks, and adds their products
        up; nothing is copied, and no partial sum stored.
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
    options = MatmulOptions(
        ranks=read_options("matmul_reduce_scatter", axis_name, mesh, implementation, deadline),
        row_counts=row_counts,
        scaling_mode=scaling_mode,
        preferred_element_type=preferred_element_type,
        method=method,
        num_splits=num_splits,
        atomic=atomic,
        rs_overlap_first_gemm=rs_overlap_first_gemm,
        use_ce=use_ce,
        buffer=buffer,
    )
    return _matmul(options, _read_operands(options, x, w, bias), scaling_state)[0]


# ---- Both.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOperands:
    """The arrays of a matmul as the caller has them; a pytree.

    On a rank, or of all ranks: then the first dimension of *N, or of *K, is sharded over them.

        all_gather_matmul:      x [*batch, M, K],   several w [K, *N], each with a bias [*N]
        matmul_reduce_scatter:  x [*batch, M, *K],  one w [*K, N], with a bias [N]
    """

    x: Any  # the tokens
    # The weights, and for each a bias or None
    ws: tuple[Any, ...]
    biases: tuple[Any, ...]
    # How many dimensions are contracted, the last of x with the first of w
    num_contracted: int = dataclasses.field(metadata={"static": True})

    @property
    def tokens_shape(self) -> tuple[int, ...]:
        """(*batch, M)."""
        return self.x.shape[: self.x.ndim - self.num_contracted]


def _gathered(
    x: Float[Array, "*batch T K"],
    w: PyTree[Float[Array, "K _ ..."]],
    bias: PyTree[Float[Array, "..."]] | None,
): ...


def _scattered(
    x: Float[Array, "_ _ ..."], w: Float[Array, "_ ... N"], bias: Float[Array, " N"] | None
): ...


def _read_operands(options: MatmulOptions, x: Any, w: Any, bias: Any) -> MatmulOperands:
    """Returns the operands; a tuple holds several weights, or their biases."""
    op, gathers, is_several = options.op, options.gathers, isinstance(w, tuple)
    if isinstance(w, list) and any(hasattr(one, "shape") for one in w):
        raise TypeError(f"{op}: w is a list of {len(w)} arrays; pass several weights as a tuple.")
    if is_several and not (gathers and w):
        has = "at least one is needed" if gathers else "several weights need a common x"
        raise ValueError(f"{op}: w is a tuple of {len(w)}, but {has}. Pass an array.")
    num_biases = len(bias) if isinstance(bias, tuple) else None
    if num_biases != (len(w) if is_several else None) and bias is not None:
        got = f"{type(bias).__name__}" if num_biases is None else f"a tuple of {num_biases}"
        needs = f"a tuple of {len(w)} arrays or None, as w is" if is_several else "an array"
        raise ValueError(f"{op}: bias is {got}; it needs to be {needs}.")
    if isinstance(bias, tuple) and all(one is None for one in bias):
        bias = None
    given = read_arrays(op, _gathered if gathers else _scattered, x=x, w=w, bias=bias)
    several = lambda one: one if isinstance(one, tuple) else (one,)
    x, ws, biases = given["x"], several(given["w"]), several(given.get("bias"))
    biases *= len(ws) if bias is None else 1
    of_bias = {f"bias[{i}]": one for i, one in enumerate(biases) if one is not None}
    check_operand_types(op, None, x=x, w=ws[0], **of_bias)
    if len({w.dtype for w in ws}) > 1:
        types = " and ".join(sorted({w.dtype.name for w in ws}))
        raise TypeError(f"{op}: w is {types}; several weights need the same dtype. Convert them.")
    num_contracted = 1 if gathers else ws[0].ndim - 1
    of_x, of_w = x.shape[-num_contracted:], ws[0].shape[:num_contracted]
    if of_x != of_w or x.ndim == num_contracted:
        raise ValueError(
            f"{op}: x has {of_x} columns but w has {of_w} rows; it needs x [*batch, tokens, *K] "
            "and w [*K, N]. Transpose w, or split both over the same axis."
        )
    for i, (w, bias) in enumerate(zip(ws, biases, strict=True)):
        columns = w.shape[num_contracted:]
        if bias is not None and bias.shape != columns:
            raise ValueError(
                f"{op}: bias has shape {bias.shape}; it needs {columns}, one element for each "
                f"column of w{f'[{i}]' if is_several else ''}."
            )
    return MatmulOperands(x=x, ws=ws, biases=biases, num_contracted=num_contracted)


def _matmul(
    options: MatmulOptions, operands: MatmulOperands, state: MatmulScaling | None
) -> tuple[Array, ...]:
    op, gathers, x, w = options.op, options.gathers, operands.x, operands.ws[0]
    if options.gathered not in ("keep", "again"):
        raise ValueError(
            f"{op}: gathered is {options.gathered!r}; it needs to be 'keep' or 'again'."
        )
    mode = _read_scaling(options, state, x, w)
    out_dtype = result_dtype(op, x, w, options.preferred_element_type)
    comm, context = find_ranks(options.ranks, jax.tree.leaves(operands))
    p = comm.num_ranks
    if not p:
        name = comm.axis_names[0]
        raise ValueError(
            f"{op}: no mesh with axis {name!r} was found. Call it inside jax.shard_map over "
            f"{name!r}, or on global arrays with mesh= or under jax.set_mesh."
        )
    if not context.is_global:
        run = functools.partial(_matmul, options)
        outs = _over_explicit_axes(run, operands, state)
        if outs is not None:
            return outs
    if context.is_global and options.row_counts is not None:
        raise ValueError(
            f"{op}: got row_counts with global arrays, which are split evenly and padded. "
            "Omit it, or call inside jax.shard_map."
        )
    counts = _read_row_counts(options, operands, p, context)
    k = math.prod(w.shape[: operands.num_contracted])
    n = sum(math.prod(w.shape[operands.num_contracted :]) for w in operands.ws)
    # The rows of one group of ranks: their number, and that with equal slots on all ranks.
    batches = math.prod(operands.tokens_shape[:-1])
    rows, slot_rows = batches * sum(counts), batches * p * max(counts)
    if context.is_global:  # each rank has a part, and groups have examples or tokens
        k, n = (k, n // p) if gathers else (k // p, n)
        others = other_axes(context.mesh, comm.axis_names)
        groups = math.prod(context.mesh.shape[a] for a in others)
        if rows % groups == slot_rows % groups == 0:
            rows, slot_rows = rows // groups, slot_rows // groups
    check_contracted_blocks(op, mode, k)
    dtype = x.dtype.name if mode == ScalingMode.NO_SCALING else FORWARD_DTYPE
    shape = CommGemmShape(cast(Any, op), rows, k, n, p, jnp.dtype(dtype).itemsize)
    partial = sum_dtype(out_dtype).name
    forward, backward = choose_overlaps(options, shape, slot_rows, dtype, partial)
    s = Matmul(
        op=op,
        comm=comm,
        row_counts=counts,
        overlap=forward,
        backward=backward,
        out_dtype=out_dtype,
        keeps_gathered=options.gathered == "keep",
        scaling_mode=mode,
        # Gradients need range rather than precision, except in MXFP8.
        dy_dtype=FORWARD_DTYPE if mode == ScalingMode.MXFP8_1D_SCALING else "float8_e5m2",
        mesh=context.mesh if context.is_global else None,
    )
    with reverse_mode_only(op):
        if context.is_global:
            return _of_all_ranks(s, context, operands, state)
        return _of_rank(s, operands, state)


def _read_scaling(options: MatmulOptions, state: Any, x: Array, w: Array) -> ScalingMode:
    """Returns the mode; it must match the state, the operands and the kept arrays."""
    op, mode = options.op, ScalingMode.read(options.op, "scaling_mode", options.scaling_mode)
    is_delayed = mode == ScalingMode.DELAYED_TENSOR_SCALING
    if state is not None and not isinstance(state, MatmulScaling):
        raise TypeError(
            f"{op}: scaling_state is {type(state).__name__}; it needs to be MatmulScaling. Start "
            "with MatmulScaling.init()."
        )
    if is_delayed != (state is not None):
        raise ValueError(
            f"{op}: got {'no' if is_delayed else 'a'} scaling_state with {mode}; only "
            "DELAYED_TENSOR_SCALING uses the scales of earlier steps. "
            + ("Begin with MatmulScaling.init()." if is_delayed else "Omit it.")
        )
    if mode == ScalingMode.NO_SCALING:
        return mode
    if "float64" in (x.dtype.name, w.dtype.name):
        raise TypeError(
            f"{op}: got float64 with {mode}, which would reduce it to 8 bits, summed in float32. "
            "Convert it first."
        )
    if options.gathered == "again":
        raise ValueError(
            f"{op}: got gathered='again' with {mode}; scaled tokens are kept. Omit it, or "
            "recompute with jax.checkpoint."
        )
    return mode


def _read_row_counts(
    options: MatmulOptions, operands: MatmulOperands, num_ranks: int, context: CallContext
) -> tuple[int, ...]:
    """Returns the rows of each rank's chunk, per batch; of global arrays blocks of one size."""
    op, rows, given = options.op, operands.tokens_shape[-1], options.row_counts
    if context.is_global:
        room = max(1, -(-rows // num_ranks))
        return tuple(min(room, max(0, rows - q * room)) for q in range(num_ranks))
    if given is None:
        if options.gathers:
            return (rows,) * num_ranks
        if rows % num_ranks:
            raise ValueError(
                f"{op}: {rows} tokens are not a multiple of the {num_ranks} ranks. Pass the tokens "
                "of each as row_counts=(...), or pad."
            )
        return (rows // num_ranks,) * num_ranks
    try:
        counts = tuple(operator.index(count) for count in given)
    except TypeError:
        counts = ()
    found = max(counts, default=-1) if options.gathers else sum(counts)
    if len(counts) != num_ranks or min(counts, default=-1) < 0 or found != rows:
        what = f"the largest of them {rows}" if options.gathers else f"whose sum is {rows}"
        raise ValueError(
            f"{op}: row_counts is {given!r}; it needs {num_ranks} counts, one per rank, of at "
            f"least 0, {what}: the tokens of x, which has shape {operands.x.shape}."
        )
    return counts


# ---- One rank's arrays, inside `jax.shard_map`.


def _over_explicit_axes(run: Any, operands: MatmulOperands, state) -> tuple[Array, ...] | None:
    """Returns `run(operands, state)` of one rank's arrays over the explicit axes that shard them.

    None if there are none. Batch dimensions stay sharded, all others are gathered.
    """
    axes = explicit_axes("", others=(operands, state), covers_batch=False)
    if axes is None:
        return None
    num_batch = len(operands.tokens_shape) - 1
    batch = P(*jax.typeof(operands.x).sharding.spec[:num_batch])
    return on_all_ranks(
        run,
        (operands, state),
        axes=axes,
        in_specs=(dataclasses.replace(jax.tree.map(lambda _: P(), operands), x=batch), P()),
        out_specs=batch,
        num_differentiable=2,
    )


def _of_rank(s: Matmul, operands: MatmulOperands, state) -> tuple[Array, ...]:
    names = s.comm.axis_names
    # The axes of the ranks, if JAX tracks over which axes arrays vary.
    also = frozenset().union(*(varying_axes(jax.lax.axis_index(name)) for name in names))
    operands = vary_alike(operands, also=also)
    axes, varying = names + s.comm.group_axes, varying_axes(operands.x)
    if varying:  # JAX tracks them; ranks with the same x share the state anyway
        axes = tuple(a for a in axes if a in varying)
    scales = None if state is None else use_scales(s.dy_dtype, axes, state)
    return _products(s, operands, scales)


def _products(s: Matmul, operands: MatmulOperands, scales) -> tuple[Array, ...]:
    """Returns the product of each weight; they are multiplied as one matrix."""
    num_contracted = operands.num_contracted
    k = math.prod(operands.ws[0].shape[:num_contracted])
    columns = [w.shape[num_contracted:] for w in operands.ws]
    sizes = [math.prod(dims) for dims in columns]
    ws = tuple(w.reshape(k, n) for w, n in zip(operands.ws, sizes, strict=True))
    bias, given = None, [bias for bias in operands.biases if bias is not None]
    if given:
        dtype = jnp.result_type(*given)
        of_all = [
            jnp.zeros(n, dtype) if bias is None else bias.reshape(n).astype(dtype)
            for bias, n in zip(operands.biases, sizes, strict=True)
        ]
        bias = s.join(of_all)
    x = operands.x.reshape(*operands.tokens_shape, k)
    product, _ = matmul(s, False, x, ws, bias, scales)
    parts = zip(s.split(product, sizes), columns, strict=True)
    return tuple(part.reshape(*part.shape[:-1], *dims) for part, dims in parts)


# Jitted, so that the compiler sees all of it even without an outer `jit`.
_one_program = jax.jit(_products, static_argnums=0, inline=True)


# ---- Matmuls of global arrays under plain `jit`, by a Shardy rule or an inner `shard_map`.
#
# Over automatic axes the partitioner keeps known shardings, see `rank`. Explicit axes are read from
# the types: batch dimensions, and tokens on axes other than the ranks', keep their sharding.


def _of_all_ranks(
    s: Matmul, context: CallContext, operands: MatmulOperands, state
) -> tuple[Array, ...]:
    gathers, p = s.gathers, s.comm.num_ranks
    for w in operands.ws:
        split = w.shape[1 if gathers else 0]
        if split % p:
            raise ValueError(
                f"{s.op}: w has shape {w.shape}, whose dimension of {split} is not divisible by "
                f"the {p} devices of {s.comm.axis_names}. Pad it."
            )
    rows, room = operands.tokens_shape[-1], p * max(s.row_counts)
    if gathers:
        operands = dataclasses.replace(operands, x=pad_rows(operands.x, room))
    if context.open_axes:
        refuse_mapped_explicit_axes(s.op, context.mesh)
        outs = _inside_shard_map(s, context, operands, state)
        if gathers or room == rows:
            return outs
        batch, _ = _explicit_axes(s, context, operands)
        whole = P(*batch, None, None)  # tokens that do not divide are not sharded
        return (place(outs[0], context.mesh, whole)[..., :rows, :],)
    if context.mesh is not None:
        refuse_other_mesh(s.op, context.mesh, (operands.x, *operands.ws))
    scales = None if state is None else use_scales(s.dy_dtype, (), state)
    outs = _one_program(s, operands, scales)
    return outs if gathers or room == rows else (outs[0][..., :rows, :],)


def _explicit_axes(s: Matmul, context: CallContext, operands: MatmulOperands):
    """Returns how types shard batch dimensions and tokens, apart from the ranks."""
    mesh = context.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    is_free = lambda a: (
        kinds.get(a) == AxisType.Explicit and a in context.open_axes and a not in s.comm.axis_names
    )
    x, num_dims = operands.x, len(operands.tokens_shape)
    spec = (*jax.typeof(x).sharding.spec, *(None,) * num_dims)[:num_dims]
    *batch, tokens = [tuple(filter(is_free, axes_of(entry))) for entry in spec]
    return [axes or None for axes in batch], dividing_axes(s, mesh, tokens)


def _inside_shard_map(s: Matmul, context: CallContext, operands: MatmulOperands, state):
    gathers = s.gathers
    names, mesh = s.comm.axis_names, context.mesh
    batch, tokens = _explicit_axes(s, context, operands)
    by_rows, by_columns = P(*batch, tokens + names), P(*batch, tokens or None, names)
    of_bias = P(names) if gathers else P()
    specs = dataclasses.replace(
        operands,
        x=by_rows if gathers else by_columns,
        ws=(P(None, names) if gathers else P(names),) * len(operands.ws),
        biases=tuple(None if bias is None else of_bias for bias in operands.biases),
    )
    operands = jax.tree.map(lambda a, spec: place(a, mesh, spec), operands, specs)
    groups = math.prod(mesh.shape[name] for name in tokens)
    counts = tuple(count // groups for count in s.row_counts)
    local = dataclasses.replace(s, row_counts=counts, comm=s.comm.inside(mesh), mesh=None)
    return on_all_ranks(
        functools.partial(_of_rank, local),
        (operands, state),
        axes=MeshAxes(mesh, names, (), (), frozenset(context.open_axes)),
        in_specs=(specs, P()),
        out_specs=by_columns if gathers else by_rows,
        num_differentiable=2,
    )
