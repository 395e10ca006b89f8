"""`gemm_p`: the gemm of one rank, alone or overlapped with communication, on each platform."""

import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator, rank_index
from jax_cp_dispatch._ranks.gpu import compute_capability, what_pointers_lack
from jax_cp_dispatch._ranks.implementations import (
    NCCL_WINDOW,
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
    lower_opened,
    one_after_another,
    prepare_cpu_devices,
    run_alone,
)
from jax_cp_dispatch._ranks.options import vary_alike, with_manual_axes
from jax_cp_dispatch._ranks.processes import num_cpu_devices_here
from jax_cp_dispatch.buffers import CommOverlapConfig, CommOverlapMethod, CommOverlapType
from jax_cp_dispatch.scaling import (
    BYTE_FLOATS,
    BlockLayout,
    Quantized,
    ScalingMode,
    dequantize,
    pad_scales,
    scales_shape,
    swizzle_scales,
    tiles_shape,
    unpad_scales,
)

_NO_OVERLAP = CommOverlapConfig()
_like = jax.ShapeDtypeStruct


class GemmOperands(NamedTuple):
    """Operands of the handler; those that are None become one element for XLA."""

    lhs: Any
    lhs_scale_inv: Any = None
    rhs: Any = None
    rhs_scale_inv: Any = None
    bias: Any = None
    gelu_input: Any = None
    aux_in: Any = None


class GemmResults(NamedTuple):
    """Results of the handler, or their shapes; unused ones as in `GemmOperands`."""

    output: Any
    bias_grad: Any = None
    pre_gelu_out: Any = None
    aux_out: Any = None
    lhs_swizzled: Any = None
    rhs_swizzled: Any = None
    workspace: Any = None


def collapse(shape: tuple[int, ...], boundary: int) -> tuple[int, int]:
    """Collapses a shape to rows, the dimensions before `boundary`, and columns."""
    return math.prod(shape[:boundary]), math.prod(shape[boundary:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmCall:
    op: str  # the public function, for messages
    comm: Communicator  # the ranks; without axes the call does not communicate
    # Leading dimensions that are rows
    lhs_boundary: int = 1
    rhs_boundary: int = 1
    # Of the output; with communication, columns are its last dimension
    out_shape: tuple[int, ...]
    out_dtype: str
    overlap: CommOverlapConfig = _NO_OVERLAP  # how it communicates
    lhs_transposed: bool = False  # the contracted dimensions of lhs are its rows, not its columns
    rhs_transposed: bool = False  # the contracted dimensions of rhs are its columns, not its rows
    row_counts: tuple[int, ...] = ()  # rows of each rank's chunk, per batch
    num_batches: int = 1  # batches into which every rank's rows are divided
    in_ring_order: bool = False  # chunks are in the order in which the atomic ring processes them
    gathers_to_aux: bool = False  # the gathered lhs is also a result
    scaling_mode: ScalingMode = ScalingMode.NO_SCALING  # how operands are scaled
    # A bias is added. With `grad`, its gradient is a result instead: the sum of the output's rows
    # with `fuse_gelu`, else the sum of the rows of rhs.
    fuse_bias: bool = False
    # The output is GELU of the product, which is also a result. With `grad`, the output is the
    # product times GELU's derivative at `gelu_input`.
    fuse_gelu: bool = False
    grad: bool = False
    # Sum 8-bit operands in float32; for GPUs only, as CPUs always do
    use_split_accumulator: bool = True

    @property
    def is_mxfp8(self) -> bool:
        return self.scaling_mode == ScalingMode.MXFP8_1D_SCALING

    @property
    def has_derivative(self) -> bool:
        communicates = bool(self.comm.axis_names)
        return not (communicates or self.grad or self.scaling_mode != ScalingMode.NO_SCALING)

    @property
    def scale_layouts(self) -> tuple[BlockLayout, BlockLayout]:
        """Layouts of the scales of lhs and rhs: blocks of 32 lie along the contracted dimension."""
        return (
            "column" if self.lhs_transposed else "row",
            "row" if self.rhs_transposed else "column",
        )

    def sizes(self, operands: GemmOperands) -> tuple[int, int, int]:
        """Returns M, N and K of a rank's whole product."""
        lhs = collapse(operands.lhs.shape, self.lhs_boundary)
        rhs = collapse(operands.rhs.shape, self.rhs_boundary)
        k, m = lhs if self.lhs_transposed else lhs[::-1]
        if self.overlap.gathers and not self.overlap.is_bulk:
            m = self.num_batches * sum(self.row_counts)
        return m, rhs[0 if self.rhs_transposed else 1], k

    def result_shapes(self, operands: GemmOperands) -> GemmResults:
        """Returns the shape and dtype of each result, None for absent ones."""
        lhs, overlap = operands.lhs, self.overlap
        output = _like(self.out_shape, self.out_dtype)
        gathers = overlap.gathers and not overlap.is_bulk
        aux = lhs_swizzled = rhs_swizzled = None
        if overlap.is_bulk:
            x = operands.aux_in
            rows = sum(self.row_counts) if overlap.gathers else max(self.row_counts)
            aux = _like((*x.shape[:-2], rows, x.shape[-1]), x.dtype)
        elif gathers and self.in_ring_order:  # written even if not requested
            aux = _like(lhs.shape, lhs.dtype)
        elif self.gathers_to_aux:
            aux = _like((*lhs.shape[:-2], sum(self.row_counts), lhs.shape[-1]), lhs.dtype)
        if self.is_mxfp8:
            m, n, k = self.sizes(operands)
            rhs_swizzled = _like(tiles_shape(n, k), np.uint8)
            if self.gathers_to_aux or not gathers:
                lhs_swizzled = _like(tiles_shape(m, k), np.uint8)
        return GemmResults(
            output=output,
            bias_grad=_like(output.shape[-1:], output.dtype)
            if self.fuse_bias and self.grad
            else None,
            pre_gelu_out=output if self.fuse_gelu and not self.grad else None,
            aux_out=aux,
            lhs_swizzled=lhs_swizzled,
            rhs_swizzled=rhs_swizzled,
            workspace=self._workspace(operands),
        )

    def _workspace(self, operands: GemmOperands) -> jax.ShapeDtypeStruct | None:
        """Returns the memory for chunks, if no buffer is registered."""
        overlap = self.overlap
        if overlap.is_bulk or overlap.comm_type == CommOverlapType.NONE:
            return None
        is_scaled = self.scaling_mode != ScalingMode.NO_SCALING
        moved = jnp.dtype(overlap.buffer_dtype if overlap.is_sum else operands.lhs.dtype)
        num_bytes = 0
        if overlap.buffer_shape is None:
            num_bytes = runtime.native.overlap_buffer_bytes(
                overlap,
                num_ranks=self.comm.num_ranks,
                shape=(
                    self.num_batches * sum(self.row_counts),
                    self.num_batches * max(self.row_counts),
                    self.out_shape[-1] if overlap.is_sum else operands.lhs.shape[-1],
                ),
                dtype=moved.name,
                has_scales=is_scaled and not overlap.is_sum,
                gathers_to_aux=self.gathers_to_aux,
            )
        if overlap.is_sum:  # at least one element, to convey the type
            return _like((max(1, num_bytes // moved.itemsize),), moved)
        dtype = np.dtype(np.uint8) if is_scaled else moved
        return _like((num_bytes // dtype.itemsize,), dtype) if num_bytes else None

    def attributes(self, operands: GemmOperands, num_threads: int = 1) -> dict[str, Any]:
        overlap, aux = self.overlap, operands.aux_in
        return {
            "op": self.op,
            **self.comm.attributes(),
            "num_threads": np.int64(num_threads),
            "scaling_mode": np.int64(self.scaling_mode),
            "comm_overlap_method": np.int64(overlap.method),
            "comm_type": np.int64(overlap.comm_type),
            "comm_overlap_id": np.int64(overlap.id),
            "num_splits": np.int64(overlap.num_splits),
            "atomic": overlap.atomic_gemm,
            "overlap_first_gemm": overlap.rs_overlap_first_gemm,
            "aggregate": overlap.aggregate_ag,
            "copies": overlap.use_ce,
            "lhs_axis_boundary": np.int64(self.lhs_boundary),
            "rhs_axis_boundary": np.int64(self.rhs_boundary),
            "aux_axis_boundary": np.int64(1 if aux is None else len(aux.shape) - 1),
            "lhs_transposed": self.lhs_transposed,
            "rhs_transposed": self.rhs_transposed,
            "fuse_bias": self.fuse_bias,
            "fuse_gelu": self.fuse_gelu,
            "grad": self.grad,
            "row_counts": np.array(self.row_counts, np.int64),
            "num_batches": np.int64(self.num_batches),
            "in_ring_order": self.in_ring_order,
            "gathers_to_aux": self.gathers_to_aux,
        }


# ---- The primitives. Their parameters: the call, which operands there are, and the results.


def make_primitive(name: str, operation: Operation, why: Callable[[GemmCall], str]) -> Primitive:
    """Returns a primitive that the implementations lower; `why` it has no derivative of a call.

    A `jax.custom_vjp` around it defines the derivative of calls with `has_derivative`.
    """

    def refuse(*_, call: GemmCall, **params):
        raise NotImplementedError(f"{call.op}: {why(call)}")

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_shapes)
    primitive.def_impl(functools.partial(run_alone, primitive))
    ad.primitive_jvps[primitive] = refuse
    # Each call between ranks has a number.
    rule = functools.partial(_lower, primitive, operation)
    mlir.register_lowering(primitive, rule, cacheable=operation is Operation.GROUPED_GEMM)
    batching.primitive_batchers[primitive] = functools.partial(one_after_another, primitive)
    return primitive


def _shapes(*operands, results: Any, **_):
    update = functools.partial(operands[0].update, weak_type=False)
    return [update(shape=x.shape, dtype=x.dtype) for x in jax.tree.leaves(results)]


def _lower(primitive: Primitive, operation: Operation, ctx, *operands, call: GemmCall, **params):
    def with_all_axes_manual(*operands):  # arrays that vary over automatic axes are gathered
        mesh = jax.sharding.get_abstract_mesh()
        local = dataclasses.replace(call, comm=call.comm.inside(mesh))
        return with_manual_axes(
            functools.partial(primitive.bind, call=local, **params),
            call.comm.open_axes,
            mesh,
            in_specs=(P(),) * len(operands),
            out_specs=[P()] * len(jax.tree.leaves(params["results"])),
        )(*operands)

    if call.comm.open_axes:
        return lower_opened(with_all_axes_manual, ctx, *operands)
    choice = choose(ctx, call.op, call.comm)
    rule = choice.implementation.lowerings[operation]
    return rule(ctx, *operands, call=call, choice=choice, **params)


def _why_no_derivative(call: GemmCall) -> str:
    if call.comm.axis_names:
        return (
            "with communication, no derivative is defined. Use all_gather_matmul or "
            "matmul_reduce_scatter, which are each other's derivative (reverse mode)."
        )
    return (
        "with scaled operands or grad, no derivative is defined. Define it with jax.custom_vjp "
        "around the call."
    )


gemm_p = make_primitive("gemm", Operation.GEMM, _why_no_derivative)


@jax.named_scope("cpd.gemm")
def bind_gemm(call: GemmCall, operands: GemmOperands) -> GemmResults:
    """Binds one call and returns its results. Absent operands and results are None."""
    if operands.bias is not None:  # the handler reads it as an array of the output's type
        operands = operands._replace(bias=operands.bias.astype(call.out_dtype))
    arrays, tree = jax.tree.flatten(operands)
    results = call.result_shapes(operands)
    written = gemm_p.bind(*vary_alike(arrays), call=call, tree=tree, results=results)
    return jax.tree.unflatten(jax.tree.structure(results), written)


# ---- The custom call of a gemm: what CPUs and GPUs do alike, and its lowering for CPUs.


@functools.cache
def load_blas() -> str:
    """Loads the library once; returns its file, or "" if SciPy's own routines are used.

    Raises:
      ImportError: SciPy, which JAX depends on, is not installed.
    """
    cython_blas: Any = importlib.import_module("scipy.linalg.cython_blas")
    routines = cython_blas.__pyx_capi__  # jaxlib's LAPACK uses it too
    return runtime.native.load_blas(sgemm=routines["sgemm"], dgemm=routines["dgemm"])


def threads_per_device() -> int:
    """Returns the threads of one GEMM while the other devices of this host run theirs."""
    return max(1, len(os.sched_getaffinity(0)) // num_cpu_devices_here())


def _lower_custom_call(ctx, *values, call: GemmCall, tree, results, attributes, scratch=None):
    """Lowers to the call; absent operands and results are one element.

    `scratch` replaces the workspace there.
    """

    def run(*values):
        shapes = results if scratch is None else results._replace(workspace=scratch)
        absent = _like((1,), np.float32)  # jaxlib 0.11 crashes on empty arrays
        handler = jax.ffi.ffi_call(
            runtime.GEMM_TARGET, [absent if x is None else x for x in shapes]
        )
        places = [rank_index(call.comm.axis_names), rank_index(call.comm.group_axes)]
        given = [jnp.zeros(1, np.float32) if x is None else x for x in tree.unflatten(values)]
        written = GemmResults(*handler(*places, *given, **attributes))
        if scratch is not None and results.workspace is not None:
            # It keeps the program's shape, and is never read.
            written = written._replace(workspace=jnp.zeros_like(results.workspace))
        return [x for x, shape in zip(written, results, strict=True) if shape is not None]

    return mlir.lower_fun(run, multiple_results=True)(ctx, *values)


def _lower_on_cpu(ctx, *values, call: GemmCall, tree, results, choice: Chosen):
    prepare_cpu_devices()
    load_blas()
    attributes = call.attributes(jax.tree.unflatten(tree, ctx.avals_in), threads_per_device())
    # What the call is beyond its shapes; calls meet only if they agree in this text.
    said = {"op", "axis", "num_ranks", "comm_type", "comm_overlap_method", "row_counts"}
    of_a_rank = {"deadline_ms", "num_threads", "aux_axis_boundary"}
    others = [
        name if value is True else f"{name} {value}"
        for name, value in attributes.items()
        if name not in said | of_a_rank and value
    ]
    kind = f"{call.overlap.comm_type.name}, {call.overlap.method.name}"
    what = f"{call.op} ({kind}) of rows {list(call.row_counts)}, {', '.join(others)}"
    attributes |= choice.implementation.rank_attributes(ctx, call.comm, choice.groups, what)
    params: Any = {"tree": tree, "results": results, "attributes": attributes}
    return _lower_custom_call(ctx, *values, call=call, **params)


# ---- NVIDIA GPUs: a custom call with scratch memory.

_WIDE = ("float32", "bfloat16", "float16")
_BLACKWELL = 10.0  # the first compute capability with MXFP8


def _what_gpus_lack(call: GemmCall, operands: GemmOperands) -> str | None:
    """Returns why a call on GPUs needs XLA, whatever the transport; None if it does not."""
    _, n, k = call.sizes(operands)
    lhs, rhs = (jnp.dtype(x.dtype).name for x in (operands.lhs, operands.rhs))
    out, overlap = call.out_dtype, call.overlap
    results = {out, overlap.buffer_dtype} if overlap.is_sum else {out}
    is_narrow = lhs in BYTE_FLOATS
    if is_narrow:
        fits = rhs in BYTE_FLOATS and results <= set(_WIDE)
    else:
        fits = lhs == rhs and lhs in _WIDE and results <= {lhs, "float32"}
    if not fits:
        return f"cuBLASLt does not multiply {lhs} by {rhs} with a result in {out}"
    chunks = 1
    if overlap.method == CommOverlapMethod.PIPELINE:
        chunks = max(1, min(overlap.num_splits, n))
    if is_narrow and (k % 16 or n % (16 * chunks)):
        return (
            f"8-bit operands need K in multiples of 16 and N of {16 * chunks}, not K={k} and N={n}"
        )
    if overlap.is_bulk and not overlap.gathers and operands.aux_in.dtype.name not in _WIDE:
        return f"GPUs cannot sum {operands.aux_in.dtype.name} here"
    if call.is_mxfp8:
        if call.comm.axis_names:
            return "MXFP8 products do not overlap with communication on GPUs"
        if call.fuse_bias and call.grad and not call.fuse_gelu:
            return "XLA computes the gradient of a bias with MXFP8 operands"
        found = compute_capability() / 10 if jax.default_backend() == "gpu" else _BLACKWELL
        if found < _BLACKWELL:
            return f"MXFP8 needs a GPU of compute capability {_BLACKWELL}, this one has {found}"
    return None


def scratch_of(
    call: GemmCall, operands: GemmOperands, results: GemmResults
) -> jax.ShapeDtypeStruct:
    """Returns a rank's scratch memory; its dtype is that of partial sums."""
    dtype = np.dtype(np.uint8) if results.workspace is None else results.workspace.dtype
    num_bytes = runtime.native.gemm_scratch_bytes(
        call.sizes(operands), call, has_scales=operands.lhs_scale_inv is not None
    )
    return _like((-(-num_bytes // dtype.itemsize),), dtype)


def gpu_attributes(call: GemmCall, operands: GemmOperands) -> dict[str, Any]:
    config: Any = jax.config  # its options are not declared
    precision = str(config.jax_default_matmul_precision).lower()
    return {
        **call.attributes(operands),
        "gemm_priority": np.int64(call.overlap.gemm_priority),
        "comm_priority": np.int64(call.overlap.comm_priority),
        "num_comm_sm": np.int64(call.overlap.num_comm_sm),
        "set_sm_margin": call.overlap.set_sm_margin,
        "use_split_accumulator": call.use_split_accumulator,
        "tf32": precision in ("tensorfloat32", "high", "tf32_tf32_f32"),
    }


def _lower_on_gpu(ctx, *values, call: GemmCall, tree, results, choice: Chosen):
    operands = jax.tree.unflatten(tree, ctx.avals_in)
    missing = _what_gpus_lack(call, operands)
    if choice.implementation is NCCL_WINDOW:
        missing = "windows of NCCL hold the rows of exchanges, not the chunks of products"
    elif missing is None and call.comm.axis_names:
        unmapped = what_pointers_lack(ctx, call.comm, choice.groups)
        missing = unmapped and f"{unmapped}, and products overlap through mapped memory"
    params: Any = {"call": call, "tree": tree, "results": results}
    if missing is not None:
        by_xla = fall_back(choice, call.op, call.comm, missing)
        return _lower_by_xla(ctx, *values, **params, choice=by_xla)
    runtime.open_cublaslt()
    ranks = choice.implementation.rank_attributes(ctx, call.comm, choice.groups, "")
    attributes = gpu_attributes(call, operands) | ranks
    scratch = scratch_of(call, operands, results)
    return _lower_custom_call(ctx, *values, **params, attributes=attributes, scratch=scratch)


# ---- Gemms by XLA's own collectives, for other platforms and as an oracle on the mesh.


def _lower_by_xla(ctx, *values, call: GemmCall, tree, results, choice: Chosen):
    def compute(*values):
        return jax.tree.leaves(gemm_by_xla(call, jax.tree.unflatten(tree, values), results))

    return mlir.lower_fun(compute, multiple_results=True)(ctx, *values)


def gemm_by_xla(call: GemmCall, operands: GemmOperands, results: GemmResults) -> GemmResults:
    """Computes a call without overlap, whatever the method; sums in the order of the ranks.

    `results` are the shapes of the call.
    """
    overlap = call.overlap
    lhs, rhs = _dequantized(call, operands)
    aux = None
    if overlap.is_bulk:
        x = operands.aux_in
        aux = _gather_rows(call, x) if overlap.gathers else _scatter(call, x, x.dtype)
    elif overlap.gathers:
        aux = _gather_rows(call, operands.lhs) if call.gathers_to_aux else None
        lhs = _gather_rows(call, lhs)
        if call.in_ring_order:
            lhs = lhs[..., _ring_rows(call), :]
            aux = operands.lhs
    elif overlap.is_sum and call.in_ring_order:
        lhs = lhs[..., jnp.argsort(_ring_rows(call)), :]
    wide = sum_dtype(lhs.dtype)
    dims = [
        tuple(range(boundary) if contracts_rows else range(boundary, x.ndim))
        for x, boundary, contracts_rows in (
            (lhs, call.lhs_boundary, call.lhs_transposed),
            (rhs, call.rhs_boundary, not call.rhs_transposed),
        )
    ]
    product = lax.dot_general(
        lhs,
        rhs,
        ((dims[0], dims[1]), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )
    if overlap.is_sum:  # a ring without copies reads other ranks' operands: it stores no sums
        moves_sums = not overlap.is_ring or overlap.use_ce
        partial = overlap.buffer_dtype if moves_sums else wide
        product = _scatter(call, product.astype(partial), wide)
    if operands.bias is not None:
        product = product + jnp.expand_dims(operands.bias.astype(wide), range(product.ndim - 1))
    product = product.reshape(call.out_shape)
    pre_gelu = bias_grad = None
    if call.fuse_gelu and call.grad:
        _, pull = jax.vjp(jax.nn.gelu, operands.gelu_input.astype(wide))
        (product,) = pull(product)
    elif call.fuse_gelu:
        pre_gelu, product = product.astype(call.out_dtype), jax.nn.gelu(product)
    output = product.astype(call.out_dtype)
    if call.grad and call.fuse_bias:
        summed, axis = rhs, dims[1]
        if call.fuse_gelu:
            summed, axis = output, tuple(range(output.ndim - 1))
        bias_grad = summed.astype(wide).sum(axis).reshape(-1).astype(call.out_dtype)
    if overlap.is_sum:  # zeros after the rank's own rows
        count = jnp.array(call.row_counts)[lax.axis_index(call.comm.axis_names)]
        output = jnp.where(jnp.arange(output.shape[-2])[:, None] < count, output, 0)
    swizzled = _swizzled(call, operands, results) if call.is_mxfp8 else (None, None)
    unused = jax.tree.map(jnp.zeros_like, results.workspace)
    return GemmResults(output, bias_grad, pre_gelu, aux, *swizzled, unused)


def _dequantized(call: GemmCall, operands: GemmOperands):
    """Returns lhs and rhs, dequantized if they are scaled."""
    if call.scaling_mode == ScalingMode.NO_SCALING:
        return operands.lhs, operands.rhs
    sides = zip(
        (operands.lhs, operands.rhs),
        (operands.lhs_scale_inv, operands.rhs_scale_inv),
        (call.lhs_boundary, call.rhs_boundary),
        call.scale_layouts,
        strict=True,
    )
    values = []
    for data, scale, boundary, layout in sides:
        rows = data.reshape(collapse(data.shape, boundary))
        if call.is_mxfp8:
            scale = unpad_scales(scale, shape=scales_shape(rows.shape, layout))
        q = Quantized(data=rows, scale_inv=scale, mode=call.scaling_mode, layout=layout)
        values.append(dequantize(q).reshape(data.shape))
    return values


def _swizzled(call: GemmCall, operands: GemmOperands, results: GemmResults):
    """Returns both operands' scales; those of lhs for the rows that are multiplied."""
    of_lhs, of_rhs = call.scale_layouts
    scales = operands.lhs_scale_inv
    if call.gathers_to_aux:
        lhs = operands.lhs
        flat = collapse(lhs.shape, call.lhs_boundary)
        scales = unpad_scales(scales, shape=scales_shape(flat, of_lhs))
        scales = _gather_rows(call, scales.reshape(*lhs.shape[:-1], -1))
        scales = pad_scales(scales.reshape(-1, scales.shape[-1]), layout=of_lhs)
    lhs = None if results.lhs_swizzled is None else swizzle_scales(scales, layout=of_lhs)
    return lhs, swizzle_scales(operands.rhs_scale_inv, layout=of_rhs)


def _gather_rows(call: GemmCall, x):
    """[..., capacity, K] of every rank to [..., sum of the row counts, K]."""
    chunks = lax.all_gather(x, call.comm.axis_names)
    real = [chunks[q, ..., :count, :] for q, count in enumerate(call.row_counts)]
    return jnp.concatenate(real, axis=-2)


def _scatter(call: GemmCall, x, dtype):
    """[..., sum of the row counts, N] to this rank's [..., capacity, N], summed over ranks."""
    most, begins = max(call.row_counts), np.cumsum([0, *call.row_counts])
    room = [(0, 0)] * (x.ndim - 2)
    chunks = jnp.stack(
        [
            jnp.pad(x[..., begin : begin + count, :], [*room, (0, most - count), (0, 0)])
            for begin, count in zip(begins, call.row_counts, strict=False)
        ]
    )
    parts = lax.all_to_all(chunks, call.comm.axis_names, 0, 0)  # from each rank
    wide = sum_dtype(dtype)
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    return total.astype(dtype)


def _ring_rows(call: GemmCall):
    """Returns, for each row in ring order, its place in the order of the ranks."""
    p, ends = call.comm.num_ranks, np.cumsum(call.row_counts)
    rows = [np.arange(end - n, end) for end, n in zip(ends, call.row_counts, strict=True)]
    orders = [[(rank - step) % p for step in range(1, p + 1)] for rank in range(p)]
    tables = [np.concatenate([rows[q] for q in order]) for order in orders]
    return jnp.array(np.stack(tables))[lax.axis_index(call.comm.axis_names)]


register_lowering(Operation.GEMM, _lower_on_cpu, on=ON_CPU)
register_lowering(Operation.GEMM, _lower_on_gpu, on=[*ON_GPU, NCCL_WINDOW])
register_lowering(Operation.GEMM, _lower_by_xla, on=[XLA])
