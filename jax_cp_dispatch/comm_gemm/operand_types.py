"""Checks operands, types, flags and the mode of differentiation of all GEMMs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch.comm_gemm.types import BYTE_FLOATS, FLOATS, ScalingMode


def read_array(op: str, name: str, value: Any) -> Array:
    """Returns an array from an array or nested lists of numbers."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{op}: {name} is {type(value).__name__}; it needs to be an array, or nested lists of "
            f"numbers that make one. {error}"
        ) from None


def read_flag(op: str, name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError(f"{op}: {name} is {value!r}; it needs to be True or False.")


def check_operand_types(op: str, lhs: Array, rhs: Array, mode: ScalingMode) -> None:
    """Requires that the types match each other and the mode."""
    if all(x.dtype.name == "float8_e5m2" for x in (lhs, rhs)):
        raise ValueError(
            f"{op}: got float8_e5m2 for lhs and rhs; at least one needs to be float8_e4m3fn. "
            "Quantize it to that."
        )
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        is_scaled = mode != ScalingMode.NO_SCALING
        allowed = BYTE_FLOATS if is_scaled else FLOATS
        if array.dtype.name in allowed:
            continue
        other = array.dtype.name in BYTE_FLOATS + FLOATS
        remedy = "Quantize it first" if is_scaled else "Pass its scaling_mode and inverse scale"
        raise TypeError(
            f"{op}: {name} is {array.dtype} with {mode}; it needs to be one of {allowed}."
            + (f" {remedy}." if other else "")
        )
    if (lhs.dtype.name == "float64") != (rhs.dtype.name == "float64"):
        raise TypeError(
            f"{op}: lhs is {lhs.dtype} and rhs {rhs.dtype}; float64 can only be used with float64. "
            "Convert one."
        )


def result_dtype(op: str, x: Array, w: Array, preferred: Any) -> str:
    """Returns the name of the result's type."""
    is_scaled = x.dtype.name in BYTE_FLOATS
    natural = jnp.dtype(jnp.bfloat16) if is_scaled else jnp.promote_types(x.dtype, w.dtype)
    try:
        name = jnp.dtype(natural if preferred is None else preferred).name
    except TypeError:
        name = repr(preferred)
    if name in BYTE_FLOATS:
        raise TypeError(
            f"{op}: preferred_element_type is {name}; a product of 8 bits would need a scale of "
            f"its own. It needs to be one of {FLOATS[:3]}: quantize the result."
        )
    if name not in FLOATS or (name == "float64") != (natural.name == "float64"):
        raise TypeError(
            f"{op}: preferred_element_type is {name} for operands of {natural.name}; it needs to "
            f"be one of {FLOATS}, and float64 can only be used with float64."
        )
    return name


@contextlib.contextmanager
def reverse_mode_only(op: str) -> Iterator[None]:
    """Names the operation in the error, which JAX's own message does not."""
    try:
        yield
    except TypeError as error:
        if "forward-mode autodiff" not in str(error):
            raise
        raise TypeError(
            f"{op}: got forward mode (jax.jvp, jax.jacfwd, jax.hessian), but it has a derivative "
            "in reverse mode only, of any order. Use jax.vjp, jax.grad or jax.jacrev: a Hessian "
            "is jax.jacrev(jax.grad(...))."
        ) from None
