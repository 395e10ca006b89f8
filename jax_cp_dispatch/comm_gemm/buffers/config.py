"""The parameters of a communication buffer, their checks, and the id made from them."""

import dataclasses
import hashlib
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.comm_gemm.types import (
    BYTE_FLOATS,
    FLOATS,
    CommOverlapMethod,
    CommOverlapType,
    read_flag,
)

_ADDRESS_SPACE = 2**47
_MOST_SPLITS = 2**20  # each has its own signals


@dataclasses.dataclass(frozen=True)
class CommOverlapConfig:
    """All parameters of a buffer (see `create_comm_overlap_buffer`); equal ones share an id."""

    comm_type: CommOverlapType
    method: CommOverlapMethod
    buffer_shape: tuple[int, int]
    buffer_dtype: str
    tp_size: int
    num_splits: int
    num_max_streams: int
    comm_cga_size: int
    gemm_priority: int
    comm_priority: int
    num_comm_sm: int
    set_sm_margin: bool
    use_ce: bool
    atomic_gemm: bool
    rs_overlap_first_gemm: bool
    aggregate_ag: bool

    @property
    def text(self) -> str:
        """Every parameter by name; the same in every process."""
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return ", ".join(f"{name}={value}" for name, value in pairs)

    @property
    def id(self) -> int:
        """A positive number of 63 bits: a hash of all parameters."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % (2**63 - 1) + 1

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank."""
        if self.comm_type == CommOverlapType.NONE:
            return 0
        rows, columns = self.buffer_shape
        is_ring = self.method == CommOverlapMethod.RING_EXCHANGE
        return runtime.native.overlap_buffer_bytes(
            self,
            num_ranks=self.tp_size,
            shape=(rows, -(-rows // self.tp_size), columns),
            dtype=self.buffer_dtype,
            has_scales=is_ring and self.buffer_dtype in BYTE_FLOATS,
            # Without copies each rank reads the others' rows in place; scales always move.
            gathers_to_aux=is_ring and not self.use_ce,
        )


_DEFAULTS = {
    "num_splits": 4,
    "num_max_streams": 3,
    "comm_cga_size": None,
    "gemm_priority": 0,
    "comm_priority": 0,
    "num_comm_sm": None,
    "set_sm_margin": None,
    "use_ce": None,
    "atomic_gemm": False,
    "rs_overlap_first_gemm": False,
    "aggregate_ag": False,
}
_RING_DEFAULTS = {"comm_cga_size": 1, "num_comm_sm": 1, "set_sm_margin": False, "use_ce": True}
_OTHER_DEFAULTS = {"comm_cga_size": 2, "num_comm_sm": 16, "set_sm_margin": True, "use_ce": False}


def read_config(op: str, **given: Any) -> CommOverlapConfig:
    """Returns the checked parameters, with the method's defaults in place of None.

    `given` are arguments of `create_comm_overlap_buffer`, whose defaults apply to the others.
    """
    comm_type = CommOverlapType.read(op, "comm_type", given["comm_type"])
    method = CommOverlapMethod.read(op, "method", given["method"])
    is_ring = method == CommOverlapMethod.RING_EXCHANGE
    of_method = _RING_DEFAULTS if is_ring else _OTHER_DEFAULTS
    given = {**_DEFAULTS, **given}
    given |= {name: default for name, default in of_method.items() if given[name] is None}
    integer = lambda name, *limits: _integer(op, name, given[name], *limits)
    flag = lambda name: read_flag(op, name, given[name])
    config = CommOverlapConfig(
        comm_type=comm_type,
        method=method,
        buffer_shape=_shape(op, given["buffer_shape"]),
        buffer_dtype=_dtype(op, given["buffer_dtype"], comm_type),
        tp_size=integer("tp_size", 1),
        num_splits=integer("num_splits", 1, _MOST_SPLITS),
        num_max_streams=integer("num_max_streams", 1),
        comm_cga_size=integer("comm_cga_size", 1),
        gemm_priority=integer("gemm_priority"),
        comm_priority=integer("comm_priority"),
        num_comm_sm=integer("num_comm_sm", 1),
        set_sm_margin=flag("set_sm_margin"),
        use_ce=flag("use_ce"),
        atomic_gemm=flag("atomic_gemm"),
        rs_overlap_first_gemm=flag("rs_overlap_first_gemm"),
        aggregate_ag=flag("aggregate_ag"),
    )
    _check_combination(op, config)
    return config


def _check_combination(op: str, config: CommOverlapConfig) -> None:
    kind, method = config.comm_type, config.method
    check_pair(op, kind, method)
    is_ring, is_pipeline = (
        method == m for m in (CommOverlapMethod.RING_EXCHANGE, CommOverlapMethod.PIPELINE)
    )
    num_bytes = math.prod(config.buffer_shape) * jnp.dtype(config.buffer_dtype).itemsize
    if num_bytes * config.tp_size < _ADDRESS_SPACE or (is_ring and not config.use_ce):
        num_bytes = config.rank_bytes
    if kind != CommOverlapType.NONE and num_bytes * config.tp_size >= _ADDRESS_SPACE:
        raise ValueError(
            f"{op}: buffer_shape is {config.buffer_shape}, {num_bytes} bytes for each of "
            f"{config.tp_size} ranks; a process can address less than 2**47 bytes. Use a "
            "smaller one."
        )
    if config.atomic_gemm and not (is_ring or is_pipeline):
        raise ValueError(
            f"{op}: got atomic_gemm with {method}; chunk counters need chunks: "
            "CommOverlapMethod.PIPELINE or RING_EXCHANGE."
        )
    if config.rs_overlap_first_gemm and config.atomic_gemm and is_pipeline:
        raise ValueError(
            f"{op}: got rs_overlap_first_gemm with atomic_gemm; all products are one step there, "
            "and a chunk's sum does not wait for the next one's. Omit one of them."
        )
    if config.rs_overlap_first_gemm and not is_pipeline:
        raise ValueError(
            f"{op}: got rs_overlap_first_gemm with {method}; it orders the chunks of "
            "CommOverlapMethod.PIPELINE. Omit it."
        )
    if config.aggregate_ag:
        if not (is_ring and kind == CommOverlapType.AG) or config.atomic_gemm:
            raise ValueError(
                f"{op}: got aggregate_ag with {kind}, {method}, atomic_gemm={config.atomic_gemm}; "
                "it moves pairs of chunks in the all-gather of CommOverlapMethod.RING_EXCHANGE, "
                "without atomic_gemm. Omit it."
            )
        if not config.use_ce:
            raise ValueError(
                f"{op}: got aggregate_ag with use_ce=False; pairs of chunks are copied, and a GEMM "
                "that reads the memory of other ranks has no pairs. Omit one of them."
            )
        if config.tp_size % 2:
            raise ValueError(
                f"{op}: got aggregate_ag with tp_size={config.tp_size}; pairs need an even "
                "number of ranks. Omit it."
            )


def check_pair(op: str, kind: CommOverlapType, method: CommOverlapMethod) -> None:
    """Requires that the method supports the type of communication."""
    if (kind == CommOverlapType.NONE) != (method == CommOverlapMethod.NONE):
        raise ValueError(
            f"{op}: got {kind} with {method}; either both are NONE, a GEMM without communication, "
            "or neither. Pass both."
        )
    if (kind, method) == (CommOverlapType.AG, CommOverlapMethod.PIPELINE):
        raise ValueError(
            f"{op}: got {method} with {kind}; column chunks of a product can be reduced, but not "
            "gathered. Use CommOverlapMethod.RING_EXCHANGE."
        )


def _shape(op: str, shape: Sequence[int]) -> tuple[int, int]:
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if len(sizes) != 2:
        raise ValueError(
            f"{op}: buffer_shape is {shape!r}; it needs two sizes: the gathered lhs of an "
            "all-gather, the whole output of a reduce-scatter, collapsed to rows and columns."
        )
    rows, columns = (_integer(op, "buffer_shape", size, 1) for size in sizes)
    return rows, columns


def _dtype(op: str, dtype: Any, comm_type: CommOverlapType) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    allowed = FLOATS + BYTE_FLOATS if comm_type == CommOverlapType.AG else FLOATS
    if name not in allowed:
        raise ValueError(
            f"{op}: buffer_dtype is {name} with {comm_type}; it needs to be one of {allowed}."
        )
    return name


def _integer(
    op: str, name: str, value: Any, minimum: int | float = -math.inf, maximum: int = 2**62 - 1
) -> int:
    needs = "an integer" if minimum == -math.inf else f"an integer of at least {minimum}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if maximum < 2**62 - 1 or (number is not None and number > maximum):
        needs += f" and at most {maximum}"
    if number is None:
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be {needs}.")
    if not minimum <= number <= maximum:
        raise ValueError(f"{op}: {name} is {number}; it needs to be {needs}.")
    return number
