"""Enumerations of communication and scaling, types of arrays, and checks of operands."""

import contextlib
import enum
from collections.abc import Iterator
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

_Member = TypeVar("_Member", bound=enum.Enum)  # Self, for the run-time checks of the tests


class _Named(enum.IntEnum):
    """An enumeration whose members may also be given by name."""

    @classmethod
    def read(cls: type[_Member], op: str, name: str, value: Any) -> _Member:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        if isinstance(value, cls):
            return value
        raise ValueError(
            f"{op}: {name} is {value!r}; it needs to be one of "
            f"{', '.join(repr(member.name) for member in cls)}, or that member of {cls.__name__}."
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class CommOverlapType(_Named):
    """The communication: none, sums to the ranks of their rows, or rows to all ranks."""

    NONE = 0
    RS = 1
    AG = 2


class CommOverlapMethod(_Named):
    """The method: no overlap, during an independent GEMM, by column chunks, or in a ring."""

    NONE = 0
    BULK = 1
    PIPELINE = 2
    RING_EXCHANGE = 3


class ScalingMode(_Named):
    """The scaling of 8-bit operands."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    CURRENT_TENSOR_SCALING = 2
    MXFP8_1D_SCALING = 3


FLOATS = ("bfloat16", "float16", "float32", "float64")
BYTE_FLOATS = ("float8_e4m3fn", "float8_e5m2")  # with scales


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
