"""Attention is differentiable once, in reverse mode: other derivatives raise named errors.

Without these markers, JAX's errors would name primitives or `custom_vjp` instead of the function
that was called. They are identities and leave nothing in a compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def in_reverse_only(op: str, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays, differentiable in reverse mode only; forward mode is an error."""
    return reverse_only_p.bind(*arrays, op=op)


def forbid_second_derivative(op: str, arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays for the rules of a derivative, which is not differentiable itself."""
    return first_only_p.bind(*arrays, op=op)


def _refuse_forward_mode(*_, op, **__):
    raise NotImplementedError(
        f"{op}: forward mode (jvp, linearize, jacfwd) is not supported. Use reverse mode: "
        "jax.vjp, jax.grad or jax.jacrev."
    )


def _refuse_second_derivative(*_, op, **__):
    raise NotImplementedError(
        f"{op}: second derivatives are not supported. For the value of a gradient "
        "alone, differentiate with respect to jax.lax.stop_gradient(x)."
    )


reverse_only_p = Primitive("in_reverse_only")
first_only_p = Primitive("forbid_second_derivative")
tangents_p = Primitive("tangents_to_transpose")


def _jvp(primals, tangents, *, op):
    outs = in_reverse_only(op, primals)
    moving = [t for t in tangents if type(t) is not ad.Zero]
    moved = iter(tangents_p.bind(*moving, op=op) if moving else ())
    return outs, [t if type(t) is ad.Zero else next(moved) for t in tangents]


def _transpose(cotangents, *_, op):
    return list(cotangents)


def _batch(primitive, operands, dims, *, op):
    return primitive.bind(*operands, op=op), list(dims)


def _complete(primitive: Primitive) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, op: list(avals))
    primitive.def_impl(lambda *arrays, op: list(arrays))
    batching.primitive_batchers[primitive] = lambda *args, **kwargs: _batch(
        primitive, *args, **kwargs
    )
    mlir.register_lowering(primitive, lambda ctx, *arrays, op: list(arrays))


for _primitive in (reverse_only_p, first_only_p, tangents_p):
    _complete(_primitive)
ad.primitive_jvps[reverse_only_p] = _jvp
ad.primitive_jvps[first_only_p] = _refuse_second_derivative
tangents_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(tangents_p, _refuse_forward_mode)
ad.primitive_jvps[tangents_p] = _refuse_second_derivative
ad.primitive_transposes[tangents_p] = _transpose
