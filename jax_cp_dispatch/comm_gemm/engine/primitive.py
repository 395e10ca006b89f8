"""`gemm_p`: one rank's product, alone or overlapped with communication."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.call_site import call_site_attributes, groups_of_program
from jax_cp_dispatch._ranks.gpu import GPU_IMPLEMENTATIONS, remember_mesh, what_pointers_lack
from jax_cp_dispatch._ranks.implementations import (
    choose_implementation,
    fall_back_to_xla,
    num_cpu_devices_here,
)
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.comm_gemm.engine.blas import load_blas
from jax_cp_dispatch.comm_gemm.engine.by_xla import gemm_by_xla
from jax_cp_dispatch.comm_gemm.engine.call import GemmCall, GemmOperands, GemmResults, place_on
from jax_cp_dispatch.comm_gemm.engine.on_gpu import lower_on_gpu, what_gpus_lack
from jax_cp_dispatch.cpu_devices import keep_freed_memory, warn_of_deadlock

gemm_p = Primitive("gemm")
gemm_p.multiple_results = True


def bind_gemm(call: GemmCall, **operands: Any) -> GemmResults:
    """Results of one call. Absent operands are left away; absent results are None."""
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


@functools.lru_cache(maxsize=256)
def _compiled(call, names):
    return jax.jit(lambda *operands: gemm_p.bind(*operands, call=call, names=names))


def _run_alone(*operands, call, names):
    with jax.disable_jit(False):  # else `bind` comes back here
        return _compiled(call, names)(*operands)


def _lower(ctx, *operands, call: GemmCall, names):
    if call.open_axes:
        with remember_mesh(ctx):
            return mlir.lower_fun(
                functools.partial(_with_all_axes_manual, call=call, names=names),
                multiple_results=True,
            )(ctx, *operands)
    platforms = ctx.module_context.platforms
    num_ranks = call.num_ranks if call.axis_names else 0
    groups = groups_of_program(ctx, call.axis_names, call.group_axes, num_ranks)
    transport = choose_implementation(call.op, call.implementation, platforms, groups)
    if transport in GPU_IMPLEMENTATIONS:
        missing = what_gpus_lack(call, _operands(ctx.avals_in, names))
        if missing is None and call.axis_names:
            unmapped = what_pointers_lack(ctx, call.axis_names, call.group_axes, call.num_ranks)
            missing = unmapped and f"{unmapped}, and products overlap through mapped memory"
        if missing is None:
            return lower_on_gpu(ctx, *operands, call=call, names=names, implementation=transport)
        transport = fall_back_to_xla(call.op, call.implementation, missing)
    if transport == "xla":
        by_xla = lambda *operands: _written(gemm_by_xla(call, _operands(operands, names)))
        return mlir.lower_fun(by_xla, multiple_results=True)(ctx, *operands)
    num_devices = jax.local_device_count("cpu")
    warn_of_deadlock(num_devices)
    if num_devices > 1:
        keep_freed_memory()
    load_blas()
    site = functools.partial(
        call_site_attributes,
        what=_what(call),
        axis_names=call.axis_names,
        num_ranks=num_ranks,
        groups=groups,
        implementation=transport,
    )
    return _lower_custom_call(ctx, *operands, call=call, names=names, site=site)


def _written(results: GemmResults) -> list[Any]:
    return [x for x in results if x is not None]


def _with_all_axes_manual(*operands, call: GemmCall, names):
    """Axes that are still automatic become manual: what varies over them is gathered."""
    local = call.without_open_axes()
    num_results = len(_written(call.result_shapes(_operands(operands, names))))
    return jax.shard_map(
        lambda *operands: gemm_p.bind(*operands, call=local, names=names),
        axis_names=set(call.open_axes),
        in_specs=tuple(P() for _ in operands),
        out_specs=[P()] * num_results,
        check_vma=False,
    )(*operands)


def _lower_custom_call(ctx, *operands, call: GemmCall, names, site):
    place = jax.typeof(np.int32(0))
    absent = jax.typeof(np.zeros((1,), np.float32))  # jaxlib 0.11 crashes on what has no element
    rank, group, nothing = mlir.lower_fun(
        lambda: (place_on(call.axis_names), place_on(call.group_axes), jnp.zeros((1,))),
        multiple_results=True,
    )(ctx.replace(avals_in=(), avals_out=None))
    given = _operands(operands, names)
    avals = _operands(ctx.avals_in, names)
    shapes = call.result_shapes(avals)
    like = ctx.avals_in[0]
    aval = lambda s: absent if s is None else like.update(shape=s[0], dtype=s[1], weak_type=False)
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_cpu_devices_here())
    aux_boundary = 1 if avals.aux_in is None else avals.aux_in.ndim - 1
    results = jax.ffi.ffi_lowering(runtime.GEMM_TARGET)(
        ctx.replace(
            avals_in=(place, place, *(absent if x is None else x for x in avals)),
            avals_out=[aval(shape) for shape in shapes],
        ),
        *(rank, group, *(nothing if x is None else x for x in given)),
        aux_axis_boundary=np.int64(aux_boundary),
        **site(ctx),
        **call.attributes(num_threads),
    )
    return [x for x, shape in zip(results, shapes, strict=True) if shape is not None]


def _what(call: GemmCall) -> str:
    """The operation and all of it that the shapes do not tell: who differs in it does not meet."""
    kind = f"{call.overlap.comm_type.name}, {call.overlap.method.name}"
    said = {"op", "axis", "num_ranks", "comm_type", "comm_overlap_method", "row_counts"}
    of_a_rank = {"deadline_ms", "num_threads"}
    others = [
        name if value is True else f"{name} {value}"
        for name, value in call.attributes(num_threads=1).items()
        if name not in said | of_a_rank and value
    ]
    return f"{call.op} ({kind}) of rows {list(call.row_counts)}, {', '.join(others)}"


def _batch(operands, dims, *, call: GemmCall, names):
    """Examples one after another: their chunks differ, and every rank has the same number."""
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def one(example):
        rest = iter(example)
        each = [x if d is None else next(rest) for x, d in zip(operands, dims, strict=True)]
        return gemm_p.bind(*each, call=call, names=names)

    outs = lax.map(one, mapped)
    return outs, [0] * len(outs)


gemm_p.def_abstract_eval(_shapes)
gemm_p.def_impl(_run_alone)
mlir.register_lowering(gemm_p, _lower)
batching.primitive_batchers[gemm_p] = _batch


def _no_derivative(primals, tangents, *, call: GemmCall, names):
    remedy = "Define it with jax.custom_vjp around the call."
    if call.axis_names:
        remedy = (
            "Take all_gather_matmul or matmul_reduce_scatter, whose derivatives are each other "
            "(reverse mode)."
        )
    what = "with communication" if call.axis_names else "of scaled operands, or with grad,"
    raise NotImplementedError(f"{call.op}: {what} it has no derivative of its own. {remedy}")


ad.primitive_jvps[gemm_p] = _no_derivative
