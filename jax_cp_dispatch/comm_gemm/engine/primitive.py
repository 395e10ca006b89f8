"""`gemm_p`: the gemm of one rank, alone or overlapped with communication."""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._ranks.call_context import with_manual_axes
from jax_cp_dispatch._ranks.implementations import (
    ON_CPU,
    ON_GPU,
    XLA,
    Operation,
    register_lowering,
)
from jax_cp_dispatch._ranks.lowering import choose, lower_opened, one_after_another, run_alone
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.comm_gemm.engine import by_xla, on_gpu
from jax_cp_dispatch.comm_gemm.engine.custom_call import lower_on_cpu
from jax_cp_dispatch.comm_gemm.engine.gemm_call import GemmCall, GemmOperands, GemmResults

register_lowering(Operation.GEMM, lower_on_cpu, on=ON_CPU)
register_lowering(Operation.GEMM, on_gpu.lower, on=ON_GPU)
register_lowering(Operation.GEMM, by_xla.lower, on=[XLA])

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
