"""Enumerations of communication and scaling, and the types of arrays."""

import enum
from typing import Any, TypeVar

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
