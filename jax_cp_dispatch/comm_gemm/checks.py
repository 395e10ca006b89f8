"""What all GEMMs check of their operands, and the errors that they share."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch.scaling import BYTE_FLOATS, FLOATS, ScalingMode, dtype_name


def read_arrays(op: str, annotated: Any, **given: Any) -> dict[str, Any]:
    """Returns arrays by name, also of nested lists, checked as a function annotates them.

    A tuple is several arrays. Absent ones are None and left out.
    """
    read = {}
    for name, value in given.items():
        several = value if isinstance(value, tuple) else (value,)
        arrays = []
        for i, x in enumerate(several):
            try:
                arrays.append(None if x is None else jnp.asarray(x))
            except (TypeError, ValueError) as error:
                at = f"{name}[{i}]" if isinstance(value, tuple) else name
                raise TypeError(
                    f"{op}: {at} is {type(x).__name__}; it needs to be an array, or nested lists "
                    f"of numbers that make one. {error}"
                ) from None
        if value is not None:
            read[name] = tuple(arrays) if isinstance(value, tuple) else arrays[0]
    check_annotated(op, annotated, read)
    return read


def check_operand_types(op: str, mode: ScalingMode | None, **operands: Array) -> None:
    """Requires that types match the mode of a gemm, and those of the first two each other."""
    (left, lhs), (right, rhs), *_ = operands.items()
    if all(x.dtype.name == "float8_e5m2" for x in (lhs, rhs)):
        raise ValueError(
            f"{op}: got float8_e5m2 for {left} and {right}; at least one needs to be "
            "float8_e4m3fn. Quantize it to that."
        )
    is_scaled = mode is not None and mode != ScalingMode.NO_SCALING
    allowed = BYTE_FLOATS if is_scaled else FLOATS
    remedy = "Quantize it first" if is_scaled else "Pass its scaling_mode and inverse scale"
    for name, array in operands.items():
        if array.dtype.name not in allowed:
            is_other = mode is not None and array.dtype.name in BYTE_FLOATS + FLOATS
            raise TypeError(
                f"{op}: {name} is {array.dtype}{'' if mode is None else f' with {mode}'}; it needs "
                f"to be one of {allowed}.{f' {remedy}.' if is_other else ''}"
            )
    if (lhs.dtype.name == "float64") != (rhs.dtype.name == "float64"):
        raise TypeError(
            f"{op}: {left} is {lhs.dtype} and {right} {rhs.dtype}; float64 can only be used with "
            "float64. Convert one."
        )


def result_dtype(op: str, x: Array, w: Array, preferred: Any) -> str:
    """Returns the name of the result's type."""
    is_scaled = x.dtype.name in BYTE_FLOATS
    natural = jnp.dtype(jnp.bfloat16) if is_scaled else jnp.promote_types(x.dtype, w.dtype)
    name = dtype_name(natural if preferred is None else preferred)
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


def required_scales(op: str, mode: ScalingMode, **scales: Any) -> dict[str, Any]:
    """Returns the scales of lhs and rhs: both for a scaling mode, none for NO_SCALING."""
    given = {name: scale for name, scale in scales.items() if scale is not None}
    if mode == ScalingMode.NO_SCALING and given:
        raise ValueError(
            f"{op}: got {next(iter(given))}_scale_inv with {mode}; scales need another "
            "scaling_mode. Omit it."
        )
    missing = [name for name in scales if name not in given]
    if mode != ScalingMode.NO_SCALING and missing:
        raise ValueError(
            f"{op}: missing inverse scaling factor of {' and '.join(missing)} for {mode}. "
            f"Pass {missing[0]}_scale_inv."
        )
    return given


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
