"""`gemm_p`: the gemm of one rank, alone or overlapped with communication."""

import functools
import importlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu import all_ranks_here, what_pointers_lack
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
    lower_opened,
    one_after_another,
    prepare_cpu_devices,
    rank_and_group,
    run_alone,
)
from jax_cp_dispatch._ranks.options import vary_alike, with_manual_axes
from jax_cp_dispatch._ranks.processes import num_cpu_devices_here
from jax_cp_dispatch._ranks.runtime import open_cublaslt
from jax_cp_dispatch.comm_gemm.call import GemmCall, GemmOperands, GemmResults, collapse
from jax_cp_dispatch.comm_gemm.quantize import (
    multiply_by_scales,
    pad_scales,
    scales_shape,
    swizzle_scales,
    unpad_scales,
)
from jax_cp_dispatch.comm_gemm.types import (
    BYTE_FLOATS,
    CommOverlapMethod,
    CommOverlapType,
    ScalingMode,
)

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


def call_handler(
    operands: GemmOperands, shapes: GemmResults, places: list[Any], attributes: dict[str, Any]
) -> GemmResults:
    """Makes the call.

    Args:
      operands: None where there is none.
      shapes: (shape, dtype) of each result, None where there is none.
      places: the device's rank and group.
      attributes: what the handler reads.
    Returns:
      The results; those without a shape have one element, as operands that are absent.
    """
    absent = (1,), np.float32  # jaxlib 0.11 crashes on empty arrays
    results = [jax.ShapeDtypeStruct(*(absent if s is None else s)) for s in shapes]
    given = [jnp.zeros(*absent) if x is None else x for x in operands]
    return GemmResults(
        *jax.ffi.ffi_call(runtime.GEMM_TARGET, results)(*places, *given, **attributes)
    )


def aux_boundary(operands: GemmOperands) -> np.int64:
    """Returns the leading dimensions of `aux_in` that are rows; 1 without it."""
    return np.int64(1 if operands.aux_in is None else len(operands.aux_in.shape) - 1)


def lower_on_cpu(
    ctx: Any, *values: Any, call: GemmCall, names: tuple[str, ...], choice: Chosen
) -> Any:
    """Lowers a call; `names` are those of the operands in `values`."""
    prepare_cpu_devices()
    load_blas()
    attributes = call.attributes(threads_per_device())
    attributes |= choice.rank_attributes(ctx, call.comm, _what(call))

    def run(*values):
        operands = GemmOperands.of(dict(zip(names, values, strict=True)))
        shapes = call.result_shapes(operands)
        more = {**attributes, "aux_axis_boundary": aux_boundary(operands)}
        written = call_handler(operands, shapes, rank_and_group(call.comm), more)
        return [x for x, shape in zip(written, shapes, strict=True) if shape is not None]

    return mlir.lower_fun(run, multiple_results=True)(ctx, *values)


def _what(call: GemmCall) -> str:
    """Describes the operation beyond its shapes; calls meet only if they agree in this text."""
    kind = f"{call.overlap.comm_type.name}, {call.overlap.method.name}"
    said = {"op", "axis", "num_ranks", "comm_type", "comm_overlap_method", "row_counts"}
    of_a_rank = {"deadline_ms", "num_threads"}
    others = [
        name if value is True else f"{name} {value}"
        for name, value in call.attributes(num_threads=1).items()
        if name not in said | of_a_rank and value
    ]
    return f"{call.op} ({kind}) of rows {list(call.row_counts)}, {', '.join(others)}"


# ---- Lowers the gemm of one rank for NVIDIA GPUs: a custom call with scratch memory.

_WIDE = ("float32", "bfloat16", "float16")
_BLACKWELL = 10.0  # the first compute capability with MXFP8


def _sizes(call: GemmCall, operands: GemmOperands) -> tuple[int, int, int]:
    """Returns M, N and K of a rank's whole product."""
    lhs = collapse(operands.lhs.shape, call.lhs_boundary)
    rhs = collapse(operands.rhs.shape, call.rhs_boundary)
    k, m = lhs if call.lhs_transposed else lhs[::-1]
    if call.gathers and not call.is_bulk:
        m = call.num_batches * sum(call.row_counts)
    return m, rhs.rows if call.rhs_transposed else rhs.columns, k


def what_gpus_lack(call: GemmCall, operands: GemmOperands) -> str | None:
    """Returns why a call on GPUs needs XLA, whatever the transport; None if it does not."""
    _, n, k = _sizes(call, operands)
    types = lhs, rhs, out = (
        jnp.dtype(operands.lhs.dtype).name,
        jnp.dtype(operands.rhs.dtype).name,
        call.out_dtype,
    )
    is_sum = call.overlap.comm_type == CommOverlapType.RS and not call.is_bulk
    results = {out, call.overlap.partial_dtype} if is_sum else {out}
    is_narrow = lhs in BYTE_FLOATS
    if is_narrow:
        fits = rhs in BYTE_FLOATS and results <= set(_WIDE)
    else:
        fits = lhs == rhs and lhs in _WIDE and results <= {lhs, "float32"}
    if not fits:
        return f"cuBLASLt does not multiply {types[0]} by {types[1]} with a result in {types[2]}"
    chunks = 1
    if call.overlap.method == CommOverlapMethod.PIPELINE:
        chunks = max(1, min(call.overlap.num_splits, n))
    if is_narrow and (k % 16 or n % (16 * chunks)):
        return (
            f"8-bit operands need K in multiples of 16 and N of {16 * chunks}, not K={k} and N={n}"
        )
    if call.is_bulk and not call.gathers and operands.aux_in.dtype.name not in _WIDE:
        return f"GPUs cannot sum {operands.aux_in.dtype.name} here"
    if call.is_mxfp8:
        if call.comm.axis_names:
            return "MXFP8 products do not overlap with communication on GPUs"
        if call.fuse_bias and call.grad and not call.fuse_gelu:
            return "XLA computes the gradient of a bias with MXFP8 operands"
        found = _compute_capability()
        if found is not None and found < _BLACKWELL:
            return f"MXFP8 needs a GPU of compute capability {_BLACKWELL}, this one has {found}"
    return None


@functools.cache
def _compute_capability() -> float | None:
    """Returns the local GPU's capability; None if programs are lowered for another machine."""
    if jax.default_backend() != "gpu":
        return None
    return float(getattr(jax.local_devices()[0], "compute_capability", _BLACKWELL))


def scratch_bytes(call: GemmCall, operands: GemmOperands) -> int:
    """Returns the bytes of a rank's scratch memory, at any alignment."""
    has_scales = operands.lhs_scale_inv is not None
    return runtime.native.gemm_scratch_bytes(_sizes(call, operands), call, has_scales=has_scales)


def _scratch(call: GemmCall, operands: GemmOperands, workspace) -> tuple[tuple[int], Any]:
    """Returns (shape, dtype) that replace the workspace's; the dtype is that of partial sums."""
    dtype = np.dtype(np.uint8) if workspace is None else jnp.dtype(workspace[1])
    return (-(-scratch_bytes(call, operands) // dtype.itemsize),), dtype


def _attributes(call: GemmCall, of_rank: GemmOperands) -> dict[str, Any]:
    config: Any = jax.config  # its options are not declared
    precision = str(config.jax_default_matmul_precision).lower()
    return {
        **call.attributes(1),
        "aux_axis_boundary": aux_boundary(of_rank),
        "gemm_priority": np.int64(call.overlap.gemm_priority),
        "comm_priority": np.int64(call.overlap.comm_priority),
        "num_comm_sm": np.int64(call.overlap.num_comm_sm),
        "set_sm_margin": call.overlap.set_sm_margin,
        "use_split_accumulator": call.use_split_accumulator,
        "tf32": precision in ("tensorfloat32", "high", "tf32_tf32_f32"),
    }


def lower_gpu(
    ctx: Any, *values: Any, call: GemmCall, names: tuple[str, ...], choice: Chosen
) -> Any:
    """Lowers a call, or leaves it to XLA; `names` are those of the operands in `values`."""
    missing = what_gpus_lack(call, GemmOperands.of(dict(zip(names, ctx.avals_in, strict=True))))
    if missing is None and call.comm.axis_names:
        unmapped = what_pointers_lack(ctx, call.comm, choice.groups)
        missing = unmapped and f"{unmapped}, and products overlap through mapped memory"
    if missing is None:
        return _lower_custom_call(ctx, *values, call=call, names=names, choice=choice)
    by_xla = fall_back(choice, call.op, call.comm, missing)
    return by_xla.lower(Operation.GEMM, ctx, *values, call=call, names=names)


def _lower_custom_call(ctx, *values, call: GemmCall, names, choice: Chosen):
    open_cublaslt()
    ranks = choice.rank_attributes(ctx, call.comm, "")

    def run(*values):
        operands = GemmOperands.of(dict(zip(names, values, strict=True)))
        attributes = _attributes(call, operands) | ranks
        shapes = call.result_shapes(operands)
        scratch = shapes._replace(workspace=_scratch(call, operands, shapes.workspace))
        written = call_handler(operands, scratch, rank_and_group(call.comm), attributes)
        if shapes.workspace is not None:  # it keeps the program's shape, and is never read
            written = written._replace(workspace=jnp.zeros(*shapes.workspace))
        return [x for x, shape in zip(written, shapes, strict=True) if shape is not None]

    return mlir.lower_fun(run, multiple_results=True)(ctx, *values)


def run_all_ranks(call: GemmCall, **operands: Any) -> GemmResults:
    """Runs a call with communication on one GPU that holds all ranks, for tests and benchmarks.

    Call under `jax.jit` for the GPU. No derivative.

    Args:
      call: the call of one rank.
      operands: by name, with a leading dimension of ranks.
    Returns:
      Results with that dimension; absent ones are None.
    """
    open_cublaslt()
    p = call.comm.num_ranks
    of_rank = {
        name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        for name, x in operands.items()
        if x is not None
    }
    avals = GemmOperands.of(of_rank)
    missing = what_gpus_lack(call, avals)
    if missing is not None:
        raise NotImplementedError(f"{call.op}: {missing}. Use implementation='xla'.")
    shapes = call.result_shapes(avals)
    scratch = shapes._replace(workspace=_scratch(call, avals, shapes.workspace))
    of_all = GemmResults(*(s and ((p, *s[0]), s[1]) for s in scratch))
    attributes = _attributes(call, avals) | all_ranks_here()
    results = call_handler(
        GemmOperands.of(operands), of_all, [jnp.int32(0), jnp.int32(0)], attributes
    )
    absent = {name: None for name, s in shapes._asdict().items() if s is None}
    return results._replace(**{**absent, "workspace": None})


# ---- Gemms by XLA's own collectives, for other platforms and as an oracle on the mesh.


def lower_xla(
    ctx: Any, *values: Any, call: GemmCall, names: tuple[str, ...], choice: Chosen
) -> Any:
    """Lowers a call; `names` are those of the operands in `values`."""

    def compute(*values):
        results = gemm_by_xla(call, GemmOperands.of(dict(zip(names, values, strict=True))))
        return [x for x in results if x is not None]

    return mlir.lower_fun(compute, multiple_results=True)(ctx, *values)


def gemm_by_xla(call: GemmCall, operands: GemmOperands) -> GemmResults:
    """Computes a call without overlap, whatever the method; sums in the order of the ranks."""
    lhs, rhs = dequantized_operands(call, operands)
    aux = None
    if call.is_bulk:
        x = operands.aux_in
        aux = _gather_rows(call, x) if call.gathers else _scatter(call, x, x.dtype)
    elif call.gathers:
        aux = _gather_rows(call, operands.lhs) if call.gathers_to_aux else None
        lhs = _gather_rows(call, lhs)
        if call.in_ring_order:
            lhs = lhs[..., _ring_rows(call), :]
            aux = operands.lhs
    elif call.overlap.comm_type == CommOverlapType.RS and call.in_ring_order:
        lhs = lhs[..., jnp.argsort(_ring_rows(call)), :]
    wide = sum_dtype(lhs.dtype)
    product = _multiply(call, lhs, rhs, wide)
    is_sum = call.overlap.comm_type == CommOverlapType.RS and not call.is_bulk
    if is_sum:
        partial = call.overlap.partial_dtype if call.moves_chunks else wide
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
        summed, axis = rhs, tuple(range(call.rhs_boundary))
        if call.rhs_transposed:
            axis = tuple(range(call.rhs_boundary, rhs.ndim))
        if call.fuse_gelu:
            summed, axis = output, tuple(range(output.ndim - 1))
        bias_grad = summed.astype(wide).sum(axis).reshape(-1).astype(call.out_dtype)
    if is_sum:
        output = _without_room(call, output)
    shapes = call.result_shapes(operands)
    unused = lambda shape: None if shape is None else jnp.zeros(*shape)
    swizzled = _swizzled(call, operands, shapes) if call.is_mxfp8 else (None, None)
    return GemmResults(output, bias_grad, pre_gelu, aux, *swizzled, unused(shapes.workspace))


def dequantized_operands(call: GemmCall, operands: GemmOperands):
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
        if call.is_mxfp8:
            flat = data.reshape(collapse(data.shape, boundary))
            scale = unpad_scales(scale, shape=scales_shape(flat.shape, layout))
            values.append(multiply_by_scales(flat, scale, layout=layout).reshape(data.shape))
        else:
            values.append(data.astype(jnp.float32) * scale[0])
    return values


def _swizzled(call: GemmCall, operands: GemmOperands, shapes: GemmResults):
    """Returns both operands' scales; those of lhs for the rows that are multiplied."""
    of_lhs, of_rhs = call.scale_layouts
    scales = operands.lhs_scale_inv
    if call.gathers_to_aux:
        lhs = operands.lhs
        flat = collapse(lhs.shape, call.lhs_boundary)
        scales = unpad_scales(scales, shape=scales_shape(flat, of_lhs))
        scales = _gather_rows(call, scales.reshape(*lhs.shape[:-1], -1))
        scales = pad_scales(scales.reshape(-1, scales.shape[-1]), layout=of_lhs)
    lhs = None if shapes.lhs_swizzled is None else swizzle_scales(scales, layout=of_lhs)
    return lhs, swizzle_scales(operands.rhs_scale_inv, layout=of_rhs)


def _multiply(call, lhs, rhs, dtype):
    rows = lambda boundary: tuple(range(boundary))
    columns = lambda boundary, x: tuple(range(boundary, x.ndim))
    dims = (
        rows(call.lhs_boundary) if call.lhs_transposed else columns(call.lhs_boundary, lhs),
        columns(call.rhs_boundary, rhs) if call.rhs_transposed else rows(call.rhs_boundary),
    )
    return lax.dot_general(
        lhs, rhs, (dims, ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )


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


def _without_room(call: GemmCall, output):
    count = jnp.array(call.row_counts)[lax.axis_index(call.comm.axis_names)]
    is_row = jnp.arange(output.shape[-2]) < count
    return jnp.where(is_row[:, None], output, 0)


def _ring_rows(call: GemmCall):
    """Returns, for each row in ring order, its place in the order of the ranks."""
    counts = np.array(call.row_counts)
    begins = np.cumsum(counts) - counts
    tables = []
    for rank in range(call.comm.num_ranks):
        order = [(rank - step) % call.comm.num_ranks for step in range(1, call.comm.num_ranks + 1)]
        tables.append(np.concatenate([begins[q] + np.arange(counts[q]) for q in order]))
    return jnp.array(np.stack(tables))[lax.axis_index(call.comm.axis_names)]


register_lowering(Operation.GEMM, lower_on_cpu, on=ON_CPU)
register_lowering(Operation.GEMM, lower_gpu, on=ON_GPU)
register_lowering(Operation.GEMM, lower_xla, on=[XLA])

gemm_p = Primitive("gemm")
gemm_p.multiple_results = True


@jax.named_scope("cpd.gemm")
def bind_gemm(call: GemmCall, **operands: Any) -> GemmResults:
    """Binds one call and returns its results. Omit absent operands; absent results are None."""
    given = {name: x for name, x in operands.items() if x is not None}
    if "bias" in given:  # the handler reads it as an array of the output's type
        given["bias"] = given["bias"].astype(call.out_dtype)
    varying = dict(zip(given, vary_alike(given.values()), strict=True))
    results = gemm_p.bind(*varying.values(), call=call, names=tuple(varying))
    shapes = call.result_shapes(_operands(varying.values(), tuple(varying)))
    written = iter(results)
    return GemmResults(*(None if shape is None else next(written) for shape in shapes))


def _operands(values, names) -> GemmOperands:
    return GemmOperands.of(dict(zip(names, values, strict=True)))


def _shapes(*operands, call: GemmCall, names):
    written = call.result_shapes(_operands(operands, names))
    like = operands[0]
    return [
        like.update(shape=shape, dtype=dtype, weak_type=False)
        for shape, dtype in filter(None, written)
    ]


def _lower(ctx, *operands, call: GemmCall, names):
    if call.comm.open_axes:
        opened = functools.partial(_with_all_axes_manual, call=call, names=names)
        return lower_opened(opened, ctx, *operands)
    choice = choose(ctx, call.op, call.comm)
    return choice.lower(Operation.GEMM, ctx, *operands, call=call, names=names)


def _with_all_axes_manual(*operands, call: GemmCall, names):
    """Makes automatic axes manual; arrays that vary over them are gathered."""
    mesh = jax.sharding.get_abstract_mesh()
    local = call.replace(comm=call.comm.inside(mesh))
    shapes = call.result_shapes(_operands(operands, names))
    num_results = sum(shape is not None for shape in shapes)
    return with_manual_axes(
        lambda *operands: gemm_p.bind(*operands, call=local, names=names),
        call.comm.open_axes,
        mesh,
        in_specs=tuple(P() for _ in operands),
        out_specs=[P()] * num_results,
    )(*operands)


gemm_p.def_abstract_eval(_shapes)
gemm_p.def_impl(functools.partial(run_alone, gemm_p))
mlir.register_lowering(gemm_p, _lower)
batching.primitive_batchers[gemm_p] = functools.partial(one_after_another, gemm_p)


def _no_derivative(primals, tangents, *, call: GemmCall, names):
    remedy = "Define it with jax.custom_vjp around the call."
    if call.comm.axis_names:
        remedy = (
            "Use all_gather_matmul or matmul_reduce_scatter, which are each other's derivative "
            "(reverse mode)."
        )
    what = "communication" if call.comm.axis_names else "scaled operands or grad"
    raise NotImplementedError(f"{call.op}: with {what}, no derivative is defined. {remedy}")


ad.primitive_jvps[gemm_p] = _no_derivative
