"""The derivatives of `all_gather_matmul` and `matmul_reduce_scatter`, which contain each other.

all_gather_matmul:      y = concat_q(x_q) w        dx = reduce_scatter(dy w'),  dw = concat(x)' dy
matmul_reduce_scatter:  y_r = rows r of sum_q x_q w_q    dx = concat(dy) w',  dw = x' concat(dy)

w is a tuple of the weights [K, N] of one x, which are multiplied as one: joined for each product,
so that no derivative keeps a copy of them. dx is one product, rounded once.

With 8-bit operands, rounding counts as identity. concat gives the rounded rows that were
multiplied, each product with w rounds both operands, and dw is a product of wide operands.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.options import (
    CallContext,
    place,
    refuse_mapped_explicit_axes,
    refuse_other_mesh,
    vary_alike,
    vary_like,
    varying_axes,
    whole_on_explicit_axes,
)
from jax_cp_dispatch._residuals import named_gathered_tokens
from jax_cp_dispatch.comm_gemm.call import GemmCall, GemmOperands, GemmResults
from jax_cp_dispatch.comm_gemm.lowering import bind_gemm, dequantized_operands
from jax_cp_dispatch.comm_gemm.matmul_operands import MatmulOperands
from jax_cp_dispatch.comm_gemm.partitioning import (
    constrain_weight,
    partition_gather,
    partition_gather_again,
    partition_scatter,
    with_rows,
)
from jax_cp_dispatch.comm_gemm.rank import (
    Matmul,
    gather_rows,
    gather_rows_again,
    keeps_token_axes,
    real_rows,
    scatter_rows,
    split_like,
    tell_lost_axes,
)
from jax_cp_dispatch.comm_gemm.scaled_operands import (
    Scales,
    check_contracted_blocks,
    tensor_amax,
    use_scales,
)
from jax_cp_dispatch.comm_gemm.types import CommOverlapType, ScalingMode
from jax_cp_dispatch.global_call import MeshAxes, explicit_axes, on_all_ranks


def _with_examples(run: Callable[..., Any], *, has_dy: bool = False):
    """Returns the same function with support for `jax.vmap`.

    If only x is mapped, the new dimension becomes a batch dimension. If weights are mapped, it is
    the first dimension of all arrays, which `run` recognizes by the dimensions of w. The same holds
    for derivatives, where each example has its own gradient of w.

    Args:
      run: function of static parts, x, w and other arrays, some of which may be None.
      has_dy: the last array is the gradient of the result.
    """

    def call(s, *arrays, **static):
        @custom_vmap
        def mapped(*arrays):
            return run(s, *arrays, **static)

        @mapped.def_vmap
        def _(size, is_mapped, *arrays):
            had_examples = arrays[1].ndim - is_mapped[1] == 3
            of_all = has_dy or had_examples or any(flag is True for flag in is_mapped[1:])
            arrays = [
                a if a is None or flag or not (of_all or i == 0) else _repeated(size, a)
                for i, (a, flag) in enumerate(zip(arrays, is_mapped, strict=True))
            ]
            if not had_examples:
                results = call(s, *arrays, **static)
            else:  # two vmaps: all pairs of examples, in order
                join = lambda a: a.reshape(-1, *a.shape[2:])
                split = lambda a: a.reshape(size, -1, *a.shape[1:])
                results = jax.tree.map(split, call(s, *jax.tree.map(join, arrays), **static))
            return results, jax.tree.map(lambda _: True, results)

        return mapped(*arrays)

    return call


def _repeated(size: int, array):
    return jnp.broadcast_to(array, (size, *array.shape))


_partition_gather = _with_examples(partition_gather)
_partition_scatter = _with_examples(partition_scatter)
_partition_gather_again = _with_examples(partition_gather_again, has_dy=True)
# Any, because type checkers do not know what a partial of it returns.
_with_own_derivative: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))


def gather(s: Matmul, x, w, bias, scales, *, gathers_to_aux: bool):
    """Result [..., sum of the row counts, N], and the gathered x or None."""
    run = gather_rows if s.mesh is None else _partition_gather
    if s.is_scaled:
        x = real_rows(s, x)
    return run(s, x, s.join(w), bias, _pair(scales), gathers_to_aux=gathers_to_aux)


def scatter(s: Matmul, x, w, bias, scales):
    """Result [..., largest row count, N], or that of all ranks."""
    run = scatter_rows if s.mesh is None else _partition_scatter
    return run(s, x, s.join(w), bias, _pair(scales))


def _pair(scales: Scales | None):
    """Returns the scales of x and w as one array."""
    return None if scales is None else jnp.concatenate([scales.x, scales.w])


@_with_own_derivative
def gather_again(s: Matmul, x, w, dy):
    """Returns dx and dw if the gathered x was not kept."""
    run = gather_rows_again if s.mesh is None else _partition_gather_again
    dx, dw = run(s, x, s.join(w), dy)
    return dx, s.split(dw, w)


def weight_gradient(s: Matmul, x, dy, w):
    """Returns x' dy, summed over rows and batches, for each weight."""
    if 0 in (*x.shape, *dy.shape):  # XLA fails where all operands of a shard_map are empty
        return tuple(vary_like(map(jnp.zeros_like, w), dy))
    lhs, rhs = (dy, x) if s.rhs_transposed else (x, dy)
    rows = tuple(range(x.ndim - 1))
    wide = sum_dtype(w[0].dtype)
    dw = jax.lax.dot_general(lhs, rhs, ((rows, rows), ((), ())), preferred_element_type=wide)
    if s.mesh is not None:
        dw = constrain_weight(s, dw)
    return s.split(dw.astype(w[0].dtype), w)


def _split_as(s: Matmul, dy, other):
    """Returns dy (possibly a constant) with batch and tokens sharded as in the forward pass."""
    if s.mesh is None or not keeps_token_axes(s, other):
        return dy
    return split_like(dy, other, dy.ndim - 1)


def bias_gradient(dy, bias):
    if bias is None:
        return None
    wide = sum_dtype(dy.dtype)
    return dy.astype(wide).sum(range(dy.ndim - 1)).astype(bias.dtype)


# ---- Derivatives. A forward rule calls its own function, so that it can be differentiated again.


@_with_own_derivative
def gathered_matmul(s: Matmul, x, w, bias, scales):
    return gather(s, x, w, bias, scales, gathers_to_aux=False)[0]


def _gathered_forward(s: Matmul, x, w, bias, scales):
    amaxes = _amaxes(s, real_rows(s, x), w, scales)
    if s.keeps_gathered:
        out, gathered = _gathered_and_kept(s, x, w, bias, scales)
        return out, (None, named_gathered_tokens(gathered), w, bias, scales, amaxes)
    return gathered_matmul(s, x, w, bias, scales), (x, None, w, bias, scales, amaxes)


def _gathered_backward(s: Matmul, residuals, dy):
    x, gathered, w, bias, scales, amaxes = residuals
    if gathered is None:
        dx, dw = gather_again(s, x, w, _split_as(s, dy, x))
    else:
        dy = _split_as(s, dy, gathered)
        dx = scattered_matmul(_adjoint(s, w, gathered.dtype), dy, w, None, _adjoint_scales(scales))
        dw = weight_gradient(s, gathered, dy, w)
    return dx, dw, bias_gradient(dy, bias), _with_amax(amaxes, dy)


@_with_own_derivative
def _gathered_and_kept(s: Matmul, x, w, bias, scales):
    return gather(s, x, w, bias, scales, gathers_to_aux=True)


def _kept_forward(s: Matmul, x, w, bias, scales):
    out, gathered = _gathered_and_kept(s, x, w, bias, scales)
    amaxes = _amaxes(s, real_rows(s, x), w, scales)
    return (out, gathered), (gathered, w, bias, scales, amaxes)


def _kept_backward(s: Matmul, residuals, cotangents):
    gathered, w, bias, scales, amaxes = residuals
    dy, dgathered = cotangents
    dx = scattered_matmul(_adjoint(s, w, gathered.dtype), dy, w, None, _adjoint_scales(scales))
    dw = weight_gradient(s, gathered, dy, w)
    dx = dx + _sum_to_ranks(s, dgathered)
    return dx, dw, bias_gradient(dy, bias), _with_amax(amaxes, dy)


@_with_own_derivative
def scattered_matmul(s: Matmul, x, w, bias, scales):
    return scatter(s, x, w, bias, scales)


def _scattered_forward(s: Matmul, x, w, bias, scales):
    return scattered_matmul(s, x, w, bias, scales), (x, w, bias, scales, _amaxes(s, x, w, scales))


def _scattered_backward(s: Matmul, residuals, dy):
    x, w, bias, scales, amaxes = residuals
    dy = _split_as(s, real_rows(s, dy), x)
    dx, gathered = _gathered_and_kept(_adjoint(s, w, x.dtype), dy, w, None, _adjoint_scales(scales))
    dw = weight_gradient(s, x, gathered, w)
    return dx, dw, bias_gradient(dy, bias), _with_amax(amaxes, dy)


# ---- Delayed scales, whose cotangents are the amaxes of x, w and dy: see `use_scales`.


def _adjoint(s: Matmul, w, dtype) -> Matmul:
    """Returns the matmul that computes dx; it contracts the columns of w, which may be sharded."""
    splits_columns = s.mesh is not None and s.overlap.comm_type == CommOverlapType.AG
    columns = sum(map(s.num_columns, w)) // (s.comm.num_ranks if splits_columns else 1)
    check_contracted_blocks(s.op, s.scaling_mode, columns)
    return s.adjoint(dtype)


def _adjoint_scales(scales: Scales | None) -> Scales | None:
    return None if scales is None else scales.of_adjoint()


def _amaxes(s: Matmul, x, w, scales: Scales | None):
    return None if scales is None else (tensor_amax(x), tensor_amax(s.join(w)))


def _with_amax(amaxes, dy):
    return None if amaxes is None else Scales(x=amaxes[0], w=amaxes[1], dy=tensor_amax(dy))


def _again_forward(s: Matmul, x, w, dy):
    return gather_again(s, x, w, dy), (x, w, dy)


def _again_backward(s: Matmul, residuals, cotangents):
    # dx = reduce_scatter(dy w') and dw = concat(x)' dy, each linear in both of its operands.
    x, w, dy = residuals
    of_dx, of_dw = cotangents
    more = lambda x, w: gathered_matmul(s, x, w, bias=None, scales=None)
    dx, dw = gather_again(s, of_dx, of_dw, dy)
    return dx, dw, more(of_dx, w) + more(x, of_dw)


def _sum_to_ranks(s: Matmul, gathered):
    """Sums gathered rows over ranks and returns each rank's own; only for second derivatives."""
    room, total = max(s.row_counts), sum(s.row_counts)
    if s.mesh is not None:
        return with_rows(gathered, s.comm.num_ranks * room)
    wide = gathered.astype(sum_dtype(gathered.dtype))
    summed = with_rows(jax.lax.psum(wide, s.comm.axis_names), total + room)
    begins = jnp.array([sum(s.row_counts[:rank]) for rank in range(s.comm.num_ranks)])
    begin = begins[jax.lax.axis_index(s.comm.axis_names)]
    own = jax.lax.dynamic_slice_in_dim(summed, begin, room, axis=-2)
    return real_rows(s, own).astype(gathered.dtype)


gathered_matmul.defvjp(_gathered_forward, _gathered_backward)
scattered_matmul.defvjp(_scattered_forward, _scattered_backward)
_gathered_and_kept.defvjp(_kept_forward, _kept_backward)
gather_again.defvjp(_again_forward, _again_backward)


# ---- A gemm that does not communicate, and its derivative: gemms again, of transposed operands.


def gemm_on_one_device(call: GemmCall, **operands: Any) -> GemmResults:
    """Computes a call without communication from the operands that are not None.

    Differentiable without scales and without `grad`.
    """
    given = {name: x for name, x in operands.items() if x is not None}
    whole = whole_on_explicit_axes(given.values())
    arrays: Any = dict(zip(given, vary_alike(whole), strict=True))
    absent = GemmResults(*[None] * 7)
    if 0 in (*arrays["lhs"].shape, *arrays["rhs"].shape):
        return _empty_sum(call, GemmOperands.of(arrays))
    if call.scaling_mode != ScalingMode.NO_SCALING or call.grad:
        return bind_gemm(call, **arrays)
    bias = arrays.get("bias")
    if call.fuse_gelu:
        both: Any = _with_gelu(call, arrays["lhs"], arrays["rhs"], bias)
        return absent._replace(output=both[0], pre_gelu_out=both[1])
    return absent._replace(output=_gemm(call, arrays["lhs"], arrays["rhs"], bias))


def _empty_sum(call: GemmCall, operands: GemmOperands) -> GemmResults:
    """Returns empty sums, since jaxlib 0.11 crashes on empty arrays."""
    output = jnp.zeros(call.out_shape, call.out_dtype)
    results = GemmResults(output, *[None] * 6)
    if call.grad and call.fuse_bias:
        _, values = dequantized_operands(call, operands)
        sums = output.sum(0) if call.fuse_gelu else values.sum(1 if call.rhs_transposed else 0)
        return results._replace(bias_grad=sums.astype(call.out_dtype))
    if operands.bias is not None:
        output = output + operands.bias[None].astype(output.dtype)
    if call.fuse_gelu and not call.grad:
        return results._replace(output=jax.nn.gelu(output), pre_gelu_out=output)
    return results._replace(output=output)


def _gelu_call(call: GemmCall, lhs, rhs, bias):
    results = bind_gemm(call, lhs=lhs, rhs=rhs, bias=bias)
    return results.output, results.pre_gelu_out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gelu(call: GemmCall, lhs, rhs, bias) -> Any:
    return _gelu_call(call, lhs, rhs, bias)


def _with_gelu_forward(call, lhs, rhs, bias):
    both: Any = _with_gelu(call, lhs, rhs, bias)
    return both, (lhs, rhs, bias, both[1])


def _with_gelu_backward(call: GemmCall, residuals, cotangents):
    lhs, rhs, bias, pre_gelu = residuals
    doutput, dpre_gelu = cotangents
    wide = sum_dtype(pre_gelu.dtype)
    _, pull = jax.vjp(jax.nn.gelu, pre_gelu.astype(wide))
    dy = (pull(doutput.astype(wide))[0] + dpre_gelu.astype(wide)).astype(pre_gelu.dtype)
    return _gemm_backward(call.replace(fuse_gelu=False), (lhs, rhs, bias), dy)


_with_gelu.defvjp(_with_gelu_forward, _with_gelu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gemm(call: GemmCall, lhs, rhs, bias) -> jax.Array:
    return bind_gemm(call, lhs=lhs, rhs=rhs, bias=bias).output


def _gemm_forward(call, lhs, rhs, bias):
    return _gemm(call, lhs, rhs, bias), (lhs, rhs, bias)


def _gemm_backward(call: GemmCall, residuals, dy):
    lhs, rhs, bias = residuals

    def product(like, left, right, *, lhs_transposed, rhs_transposed):
        form = call.replace(
            fuse_bias=False,
            lhs_transposed=lhs_transposed,
            rhs_transposed=rhs_transposed,
            out_shape=like.shape,
            out_dtype=like.dtype.name,
        )
        return _gemm(form, left, right, None)

    # dlhs = dy rhs', or its transpose rhs dy'; drhs = lhs' dy, or dy' lhs.
    of_lhs = {"lhs_transposed": False, "rhs_transposed": not call.rhs_transposed}
    pair = dy, rhs
    if call.lhs_transposed:
        of_lhs = {"lhs_transposed": call.rhs_transposed, "rhs_transposed": True}
        pair = rhs, dy
    dlhs = product(lhs, *pair, **of_lhs)
    of_rhs = {"lhs_transposed": not call.lhs_transposed, "rhs_transposed": False}
    pair = lhs, dy
    if call.rhs_transposed:
        of_rhs = {"lhs_transposed": True, "rhs_transposed": call.lhs_transposed}
        pair = dy, lhs
    drhs = product(rhs, *pair, **of_rhs)
    return dlhs, drhs, bias_gradient(dy, bias)


_gemm.defvjp(_gemm_forward, _gemm_backward)


# ---- Matmuls of global arrays under plain `jit`, by a Shardy rule or an inner `shard_map`.
#
# Over automatic axes the partitioner keeps known shardings, see `partitioning`. Explicit axes are
# read from the types: batch dimensions, and tokens on axes other than the ranks', keep their
# sharding.


def global_matmul(
    s: Matmul, context: CallContext, operands: MatmulOperands, state
) -> tuple[Array, ...]:
    """Computes the matmul of global arrays."""
    gathers, p = s.overlap.comm_type == CommOverlapType.AG, s.comm.num_ranks
    for w in operands.ws:
        split = w.shape[1 if gathers else 0]
        if split % p:
            raise ValueError(
                f"{s.op}: w has shape {w.shape}, whose dimension of {split} is not divisible by "
                f"the {p} devices of {s.comm.axis_names}. Pad it."
            )
    rows, room = operands.tokens_shape[-1], p * max(s.row_counts)
    if gathers:
        operands = dataclasses.replace(operands, x=with_rows(operands.x, room))
    if context.open_axes:
        refuse_mapped_explicit_axes(s.op, context.mesh)
        outs = _inside_shard_map(gathers, context, s, operands, state)
        if gathers or room == rows:
            return outs
        batch, _ = _explicit_axes(context, s, operands)
        whole = P(*batch, None, None)  # tokens that do not divide are not sharded
        return (place(outs[0], context.mesh, whole)[..., :rows, :],)
    if context.mesh is not None:
        refuse_other_mesh(s.op, context.mesh, (operands.x, *operands.ws))
    scales = None if state is None else use_scales(s.scaling_mode, (), state)
    outs = _one_program(gathers)(s, operands, scales)
    return outs if gathers or room == rows else (outs[0][..., :rows, :],)


@functools.cache
def _one_program(gathers: bool):
    """Jits the matmul, so that the compiler sees all of it even without an outer `jit`."""
    run = gathered_matmul if gathers else scattered_matmul

    def matmul(s, operands, scales):
        return operands.multiply(lambda *arrays: run(s, *arrays, scales), s.num_parts)

    return jax.jit(matmul, static_argnums=0, inline=True)


def even_row_counts(rows: int, num_ranks: int) -> tuple[int, ...]:
    """Returns row counts as even as blocks of one size allow."""
    room = max(1, -(-rows // num_ranks))
    return tuple(min(room, max(0, rows - q * room)) for q in range(num_ranks))


# ---- Explicit axes.


def _explicit_axes(context: CallContext, s: Matmul, operands: MatmulOperands):
    """Returns how types shard batch dimensions and tokens, apart from the ranks."""
    mesh = context.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    is_free = lambda a: (
        kinds.get(a) == AxisType.Explicit and a in context.open_axes and a not in s.comm.axis_names
    )
    x, num_dims = operands.x, len(operands.tokens_shape)
    spec = (*jax.typeof(x).sharding.spec, *(None,) * num_dims)[:num_dims]
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    *batch, tokens = [tuple(filter(is_free, axes_of(entry))) for entry in spec]
    parts = math.prod(mesh.shape[name] for name in tokens) * s.comm.num_ranks
    rows = sum(s.row_counts)
    if tokens and rows % parts:
        tell_lost_axes(s, tokens, f"{rows} tokens are not a multiple of {parts} devices; pad them")
        tokens = ()
    return [axes or None for axes in batch], tokens


def over_explicit_axes(run: Any, operands: MatmulOperands, state) -> tuple[Array, ...] | None:
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


def rank_matmul(s: Matmul, operands: MatmulOperands, state) -> tuple[Array, ...]:
    """Computes the differentiable matmul with one rank's arguments, inside `jax.shard_map`."""
    arrays, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, vary_alike(arrays, also=s.varying_axes()))
    axes, varying = s.comm.axis_names + s.comm.group_axes, varying_axes(operands.x)
    if varying:  # JAX tracks them; ranks with the same x share the state anyway
        axes = tuple(a for a in axes if a in varying)
    scales = None if state is None else use_scales(s.scaling_mode, axes, state)
    run = gathered_matmul if s.overlap.comm_type == CommOverlapType.AG else scattered_matmul
    return operands.multiply(lambda *arrays: run(s, *arrays, scales), s.num_parts)


def _inside_shard_map(
    gathers: bool, context: CallContext, s: Matmul, operands: MatmulOperands, state
):
    names, mesh = s.comm.axis_names, context.mesh
    batch, tokens = _explicit_axes(context, s, operands)
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
    local = s.replace(row_counts=counts, comm=s.comm.inside(mesh), mesh=None)
    return on_all_ranks(
        functools.partial(rank_matmul, local),
        (operands, state),
        axes=MeshAxes(mesh, names, (), ()),
        in_specs=(specs, P()),
        out_specs=by_columns if gathers else by_rows,
        num_differentiable=2,
    )
