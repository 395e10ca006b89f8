"""`gemm_p`: the gemm of one rank, alone or overlapped with communication."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.call_site import call_site_attributes
from jax_cp_dispatch._ranks.gpu import GPU_IMPLEMENTATIONS, what_pointers_lack
from jax_cp_dispatch._ranks.implementations import fall_back_to_xla
from jax_cp_dispatch._ranks.lowering import (
    choose_transport,
    lower_opened,
    lower_places,
    one_after_another,
    prepare_cpu_devices,
    run_alone,
)
from jax_cp_dispatch._ranks.place import with_manual_axes
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.comm_gemm.engine.blas import load_blas, threads_per_device
from jax_cp_dispatch.comm_gemm.engine.by_xla import gemm_by_xla
from jax_cp_dispatch.comm_gemm.engine.call import GemmCall, GemmOperands, GemmResults
from jax_cp_dispatch.comm_gemm.engine.on_gpu import lower_on_gpu, what_gpus_lack

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
    transport, groups = choose_transport(ctx, call.op, call.comm)
    if transport in GPU_IMPLEMENTATIONS:
        missing = what_gpus_lack(call, _operands(ctx.avals_in, names))
        if missing is None and call.comm.axis_names:
            unmapped = what_pointers_lack(ctx, call.comm)
            missing = unmapped and f"{unmapped}, and products overlap through mapped memory"
        if missing is None:
            return lower_on_gpu(ctx, *operands, call=call, names=names, implementation=transport)
        transport = fall_back_to_xla(call.op, call.comm.implementation, missing)
    if transport == "xla":
        by_xla = lambda *operands: _written(gemm_by_xla(call, _operands(operands, names)))
        return mlir.lower_fun(by_xla, multiple_results=True)(ctx, *operands)
    prepare_cpu_devices()
    load_blas()
    site = lambda ctx: call_site_attributes(ctx, _what(call), call.comm, groups, transport)
    return _lower_custom_call(ctx, *operands, call=call, names=names, site=site)


def _written(results: GemmResults) -> list[Any]:
    return [x for x in results if x is not None]


def _with_all_axes_manual(*operands, call: GemmCall, names):
    """Makes automatic axes manual; arrays that vary over them are gathered."""
    mesh = jax.sharding.get_abstract_mesh()
    local = call.replace(comm=call.comm.inside(mesh))
    num_results = len(_written(call.result_shapes(_operands(operands, names))))
    return with_manual_axes(
        lambda *operands: gemm_p.bind(*operands, call=local, names=names),
        call.comm.open_axes,
        mesh,
        in_specs=tuple(P() for _ in operands),
        out_specs=[P()] * num_results,
    )(*operands)


def _lower_custom_call(ctx, *operands, call: GemmCall, names, site):
    places, types = lower_places(ctx, call.comm)
    absent = jax.typeof(np.zeros((1,), np.float32))  # jaxlib 0.11 crashes on empty arrays
    (nothing,) = mlir.lower_fun(lambda: [jnp.zeros((1,))], multiple_results=True)(
        ctx.replace(avals_in=(), avals_out=None)
    )
    given = _operands(operands, names)
    avals = _operands(ctx.avals_in, names)
    shapes = call.result_shapes(avals)
    like = ctx.avals_in[0]
    aval = lambda s: absent if s is None else like.update(shape=s[0], dtype=s[1], weak_type=False)
    aux_boundary = 1 if avals.aux_in is None else avals.aux_in.ndim - 1
    results = jax.ffi.ffi_lowering(runtime.GEMM_TARGET)(
        ctx.replace(
            avals_in=(*types, *(absent if x is None else x for x in avals)),
            avals_out=[aval(shape) for shape in shapes],
        ),
        *(*places, *(nothing if x is None else x for x in given)),
        aux_axis_boundary=np.int64(aux_boundary),
        **site(ctx),
        **call.attributes(threads_per_device()),
    )
    return [x for x, shape in zip(results, shapes, strict=True) if shape is not None]


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
    what = "with communication" if call.comm.axis_names else "of scaled operands, or with grad,"
    raise NotImplementedError(f"{call.op}: {what} it has no derivative of its own. {remedy}")


ad.primitive_jvps[gemm_p] = _no_derivative
