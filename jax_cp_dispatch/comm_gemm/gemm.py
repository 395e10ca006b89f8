"""`gemm`: the engine's layer, one product with everything that a buffer lets it do beside."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_cp_dispatch._varying import vary_alike
from jax_cp_dispatch.comm_gemm.call import GemmCall, collapse, other_axes
from jax_cp_dispatch.comm_gemm.checks import check_buffer, overlap_of_config, result_dtype
from jax_cp_dispatch.comm_gemm.config import (
    FLOATS,
    CommOverlapConfig,
    CommOverlapMethod,
    CommOverlapType,
    ScalingMode,
)
from jax_cp_dispatch.comm_gemm.derivatives import bias_gradient
from jax_cp_dispatch.comm_gemm.primitive import bind_gemm
from jax_cp_dispatch.comm_gemm.registry import find_config
from jax_cp_dispatch.dispatch.buffers import DEFAULT_DEADLINE, deadline_milliseconds
from jax_cp_dispatch.dispatch.checks import check_axis_name
from jax_cp_dispatch.dispatch.implementations import check_implementation
from jax_cp_dispatch.dispatch.placement import find_place

AxisName = str | tuple[str, ...]


def gemm(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    bias: Float[Array, " N"] | None = None,
    comm_overlap: int | None = None,
    paired_comm_overlap: int | None = None,
    axis_name: AxisName | None = None,
    aux_in: Float[Array, "rows width"] | None = None,
    return_aux: bool = False,
    scaling_mode: ScalingMode | str = ScalingMode.NO_SCALING,
    lhs_scale_inv: Array | None = None,
    rhs_scale_inv: Array | None = None,
    fuse_gelu: bool = False,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    deadline: float = DEFAULT_DEADLINE,
) -> Any:
    """A matrix product, and what its communication buffer moves while it runs.

    Dimensions collapse to two: those that are contracted, and the rest. Without a buffer it is a
    plain product, differentiable, of arrays on one device. With one, call inside `jax.shard_map`
    over `axis_name`; rows are those of the collapsed lhs, and a rank's chunk is a contiguous block
    of them. For layers with batches, and for derivatives, see `all_gather_matmul` and
    `matmul_reduce_scatter`, which are made of this.

    | buffer | lhs -> output | aux_in -> aux |
    |---|---|---|
    | RING_EXCHANGE, AG | [M/p, K] -> [M, N] | nothing -> gathered lhs [M, K] |
    | RING_EXCHANGE, AG, atomic | [M/p, K] -> [M, N], chunks r-1, r-2, ..., r | -> own lhs |
    | PIPELINE or RING_EXCHANGE, RS | [M, K] -> [M/p, N] | |
    | RING_EXCHANGE, RS, atomic | [M, K], chunks r-1, r-2, ..., r -> [M/p, N] | |
    | BULK, AG | any -> any | [m/p, k] -> gathered [m, k] |
    | BULK, RS | any -> any | [m, k] -> rows of this rank, summed, [m/p, k] |

    Args:
      lhs, rhs: operands. Contracted dimensions stand side by side, first or last.
      contracting_dims: those of lhs and of rhs.
      bias: of the collapsed free dimensions of rhs; added once.
      comm_overlap: id of `create_comm_overlap_buffer`.
      paired_comm_overlap: for an atomic ring's all-gather, the id of the atomic ring's
        reduce-scatter that takes its order of chunks back.
      axis_name: the mesh axis of the ranks, or several, the major one first.
      aux_in: what a BULK buffer moves.
      return_aux: whether an all-gather also returns what it gathered.
      scaling_mode, lhs_scale_inv, rhs_scale_inv: only NO_SCALING, without scales, in this version.
      fuse_gelu: not in this version.
      preferred_element_type: of the output.
      implementation, deadline: see `all_gather_matmul`.
    Returns:
      The output, float32 accumulation, rounded once; with aux_in or return_aux, output and aux.
    Raises:
      TypeError, ValueError: arguments that are not what they need to be, or do not go together.
      NotImplementedError: what this version does not have.
      jax.errors.JaxRuntimeError: see `all_gather_matmul`.
    References:
      NVIDIA Transformer Engine, `te_gemm` and userbuffers.
    """
    op = "gemm"
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    bias = None if bias is None else jnp.asarray(bias)
    _check_scaling(op, lhs, rhs, scaling_mode, lhs_scale_inv, rhs_scale_inv)
    check_implementation(op, implementation)
    left, lhs_transposed = _collapse(op, "lhs", lhs, contracting_dims[0], contracted_last=True)
    right, rhs_last = _collapse(op, "rhs", rhs, contracting_dims[1], contracted_last=False)
    n = right.rows if rhs_last else right.columns
    sizes = lambda x, dims: tuple(x.shape[d] for d in dims)
    contracted = sizes(lhs, contracting_dims[0]), sizes(rhs, contracting_dims[1])
    if contracted[0] != contracted[1]:
        raise ValueError(
            f"{op}: lhs contracts dimensions of {contracted[0]} but rhs of {contracted[1]}, of "
            f"shapes {lhs.shape} and {rhs.shape}. See contracting_dims."
        )
    if bias is not None and bias.size != n:
        raise ValueError(
            f"{op}: bias has shape {bias.shape}; it needs {n} elements, one per column."
        )
    out_dtype = result_dtype(op, lhs, rhs, preferred_element_type)
    free_lhs = _free(lhs, contracting_dims[0])
    free_rhs = _free(rhs, contracting_dims[1])
    call = GemmCall(
        op=op,
        lhs_boundary=1,
        rhs_boundary=1,
        out_shape=(left.columns if lhs_transposed else left.rows, n),
        out_dtype=out_dtype,
        lhs_transposed=lhs_transposed,
        rhs_transposed=rhs_last,
        fuse_bias=bias is not None,
        implementation=implementation,
        deadline_ms=deadline_milliseconds(op, deadline),
    )
    bias = None if bias is None else jnp.asarray(bias, out_dtype).reshape(n)
    operands = lhs.reshape(left), rhs.reshape(right), bias
    config = None if comm_overlap is None else find_config(op, comm_overlap)
    if comm_overlap is None or config is None or config.comm_type == CommOverlapType.NONE:
        _refuse_communication(op, aux_in, return_aux)
        if fuse_gelu:
            raise NotImplementedError(f"{op}: got fuse_gelu, which this version does not have yet.")
        product: Array = _plain(call, *vary_some(*operands))
        return product.reshape(*free_lhs, *free_rhs)
    call = _with_ranks(op, call, axis_name, operands)
    asked = _Asked(comm_overlap, config, paired_comm_overlap, return_aux, fuse_gelu)
    call = _with_overlap(op, call, asked, operands[0], aux_in)
    given = dict(zip(("lhs", "rhs", "bias", "aux_in"), (*operands, aux_in), strict=True))
    results = bind_gemm(call, **given)
    rows = free_lhs if call.is_bulk else (call.out_shape[0],)
    output = results.output.reshape(*rows, *free_rhs)
    return (output, results.aux_out) if call.is_bulk or return_aux else output


class _Asked(NamedTuple):
    buffer: int
    config: CommOverlapConfig
    paired: int | None
    return_aux: bool
    fuse_gelu: bool


def vary_some(*arrays):
    """Arrays that are there vary alike; None stays."""
    varied = iter(vary_alike([x for x in arrays if x is not None]))
    return [None if x is None else next(varied) for x in arrays]


def _check_scaling(op, lhs, rhs, scaling_mode, lhs_scale_inv, rhs_scale_inv) -> None:
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    scales = {"lhs": lhs_scale_inv, "rhs": rhs_scale_inv}
    if all(x.dtype.name == "float8_e5m2" for x in (lhs, rhs)):
        raise ValueError(
            f"{op}: got float8_e5m2 for lhs and rhs; at least one needs to be float8_e4m3fn."
        )
    if mode != ScalingMode.NO_SCALING:
        missing = [name for name, scale in scales.items() if scale is None]
        if missing:
            raise ValueError(
                f"{op}: missing inverse scaling factor of {' and '.join(missing)} for {mode}. "
                f"Pass {missing[0]}_scale_inv."
            )
        raise NotImplementedError(f"{op}: got {mode}; this version has only NO_SCALING.")
    given = [name for name, scale in scales.items() if scale is not None]
    if given:
        raise ValueError(
            f"{op}: got {given[0]}_scale_inv with {mode}; scales need another scaling_mode. Leave "
            "it away."
        )
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if array.dtype.name not in FLOATS:
            raise TypeError(f"{op}: {name} is {array.dtype}; it needs to be one of {FLOATS}.")
    if (lhs.dtype.name == "float64") != (rhs.dtype.name == "float64"):
        raise TypeError(
            f"{op}: lhs is {lhs.dtype} and rhs {rhs.dtype}; float64 goes with float64 alone. "
            "Convert one."
        )


def _collapse(op, name, array, dims, *, contracted_last: bool):
    """Two sizes, and whether the contracted dimensions are on the other side than usual."""
    ndim = array.ndim
    places = [d % ndim if -ndim <= d < ndim else ndim for d in dims] if ndim else []
    count = len(places)
    is_first, is_last = places == list(range(count)), places == list(range(ndim - count, ndim))
    if not count or len(set(places)) < count or not (is_first or is_last):
        raise ValueError(
            f"{op}: contracting_dims of {name} are {tuple(dims)} for shape {array.shape}; they "
            "need to stand side by side, first or last, in their order. Transpose it."
        )
    usual = is_last if contracted_last else is_first
    boundary = ndim - count if (usual == contracted_last) else count
    return collapse(array.shape, boundary), not usual


def _free(array, dims) -> tuple[int, ...]:
    contracted = {d % array.ndim for d in dims}
    return tuple(size for d, size in enumerate(array.shape) if d not in contracted)


def _refuse_communication(op, aux_in, return_aux) -> None:
    if aux_in is not None or return_aux:
        raise ValueError(
            f"{op}: got {'aux_in' if aux_in is not None else 'return_aux'} without a buffer that "
            "moves something. Create one with create_comm_overlap_buffer and pass its id: "
            "comm_overlap=..."
        )


def _with_ranks(op, call: GemmCall, axis_name, operands) -> GemmCall:
    if axis_name is None:
        raise ValueError(
            f"{op}: got comm_overlap without axis_name; it needs the ranks' mesh axis."
        )
    names = check_axis_name(op, axis_name)
    place = find_place(op, names, None, [x for x in operands if x is not None])
    if place.is_global:
        raise ValueError(
            f"{op}: axis_name is {axis_name!r}, but this is not inside jax.shard_map over it. Call "
            "it there, or take all_gather_matmul or matmul_reduce_scatter on global arrays."
        )
    num_ranks = place.num_ranks(names)
    groups = tuple(a for a in other_axes(place.mesh, names) if a not in place.open_axes)
    return call.replace(
        axis_names=names, num_ranks=num_ranks, group_axes=groups, open_axes=place.open_axes
    )


def _with_overlap(op, call: GemmCall, asked: _Asked, lhs, aux_in) -> GemmCall:
    config = asked.config
    kind, method = config.comm_type, config.method
    is_bulk, gathers = method == CommOverlapMethod.BULK, kind == CommOverlapType.AG
    if is_bulk != (aux_in is not None):
        raise ValueError(
            f"{op}: got {'no' if is_bulk else 'an'} aux_in with buffer {asked.buffer} of {method}; "
            "an array that moves beside an independent GEMM goes with CommOverlapMethod.BULK, and "
            f"only with it. {'Pass one.' if is_bulk else 'Leave it away, or create that buffer.'}"
        )
    if asked.fuse_gelu:
        if is_bulk or not gathers:
            raise ValueError(
                f"{op}: got fuse_gelu with {kind}, {method}; GELU of a product whose sum is not "
                "complete, or beside a bulk transfer, is not possible. Apply jax.nn.gelu after it."
            )
        raise NotImplementedError(f"{op}: got fuse_gelu, which this version does not have yet.")
    if asked.return_aux and not gathers:
        raise ValueError(f"{op}: got return_aux with {kind}; only an all-gather has one.")
    if call.lhs_transposed and not is_bulk:
        raise ValueError(
            f"{op}: lhs contracts its first dimensions; its chunks are rows, so with {kind} the "
            "last ones need to be contracted. Transpose it."
        )
    p = call.num_ranks
    moved, name = (aux_in, "aux_in") if is_bulk else (lhs, "lhs")
    if moved.ndim != 2:
        raise ValueError(f"{op}: {name} has shape {moved.shape}; it needs two dimensions.")
    rows = moved.shape[0]
    if not gathers and rows % p:
        raise ValueError(
            f"{op}: {rows} rows of {name} do not divide among {p} ranks. Pad them, or take "
            "matmul_reduce_scatter with row_counts."
        )
    total = rows * p if gathers else rows
    columns = moved.shape[1] if is_bulk or gathers else call.out_shape[1]
    wide = jnp.promote_types(call.out_dtype, jnp.float32).name
    dtype = moved.dtype.name if is_bulk or gathers else wide
    check_buffer(op, asked.buffer, config, (total, columns), dtype, p)
    in_ring_order = config.atomic_gemm and method == CommOverlapMethod.RING_EXCHANGE
    if in_ring_order and gathers:
        _check_pair(op, asked, p)
    overlap = overlap_of_config(config, buffer=asked.buffer)
    out_rows = call.out_shape[0]
    if not is_bulk:
        out_rows = total if gathers else rows // p
    return call.replace(
        overlap=overlap,
        out_shape=(out_rows, call.out_shape[1]),
        row_counts=(total // p,) * p,
        in_ring_order=in_ring_order,
        gathers_to_aux=gathers and not is_bulk and not in_ring_order and asked.return_aux,
    )


def _check_pair(op, asked: _Asked, num_ranks: int) -> None:
    ring = (CommOverlapType.RS, CommOverlapMethod.RING_EXCHANGE, True, num_ranks)
    other = None if asked.paired is None else find_config(op, asked.paired)
    found = other and (other.comm_type, other.method, other.atomic_gemm, other.tp_size)
    if found != ring:
        raise ValueError(
            f"{op}: the atomic ring of buffer {asked.buffer} leaves chunks in the order r-1, r-2, "
            f"..., r, and is paired with {other.text if other else 'nothing'}; only an atomic "
            f"RING_EXCHANGE of CommOverlapType.RS with tp_size={num_ranks} takes that order back. "
            "Pass its id: paired_comm_overlap=..."
        )


# ---- The plain product and its derivative.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plain(call: GemmCall, lhs, rhs, bias) -> Array:
    if 0 in (*lhs.shape, *rhs.shape):  # jaxlib 0.11 crashes on what has no element
        zeros = jnp.zeros(call.out_shape, call.out_dtype)
        return zeros if bias is None else zeros + bias
    return bind_gemm(call, lhs=lhs, rhs=rhs, bias=bias).output


def _plain_forward(call, lhs, rhs, bias):
    return _plain(call, lhs, rhs, bias), (lhs, rhs, bias)


def _plain_backward(call: GemmCall, residuals, dy):
    lhs, rhs, bias = residuals
    plain = functools.partial(call.replace, fuse_bias=False)
    # dlhs = dy rhs', or its transpose rhs dy'; drhs = lhs' dy, or dy' lhs.
    if call.lhs_transposed:
        of_lhs = plain(lhs_transposed=call.rhs_transposed, rhs_transposed=True)
        dlhs = _plain(of_lhs.replace(out_shape=lhs.shape, out_dtype=lhs.dtype.name), rhs, dy, None)
    else:
        of_lhs = plain(lhs_transposed=False, rhs_transposed=not call.rhs_transposed)
        dlhs = _plain(of_lhs.replace(out_shape=lhs.shape, out_dtype=lhs.dtype.name), dy, rhs, None)
    if call.rhs_transposed:
        of_rhs = plain(lhs_transposed=True, rhs_transposed=call.lhs_transposed)
        drhs = _plain(of_rhs.replace(out_shape=rhs.shape, out_dtype=rhs.dtype.name), dy, lhs, None)
    else:
        of_rhs = plain(lhs_transposed=not call.lhs_transposed, rhs_transposed=False)
        drhs = _plain(of_rhs.replace(out_shape=rhs.shape, out_dtype=rhs.dtype.name), lhs, dy, None)
    return dlhs, drhs, bias_gradient(dy, bias)


_plain.defvjp(_plain_forward, _plain_backward)
