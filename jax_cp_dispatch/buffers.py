"""Registered buffers of overlapped GEMMs and of `dispatch`: created, listed, destroyed by id."""

import dataclasses
import hashlib
import inspect
import math
import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_cp_dispatch._dispatch.buffers import (
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
)
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.scaling import BYTE_FLOATS, FLOATS, Named, dtype_name

__all__ = [
    "CommOverlapBuffer",
    "CommOverlapConfig",
    "CommOverlapMethod",
    "CommOverlapType",
    "comm_overlap_buffer_bytes",
    "create_comm_overlap_buffer",
    "create_dispatch_buffer",
    "destroy_all_comm_overlap_buffers",
    "destroy_all_dispatch_buffers",
    "destroy_comm_overlap_buffer",
    "destroy_dispatch_buffer",
    "list_comm_overlap_buffers",
]

_ADDRESS_SPACE = 2**47
_MOST_SPLITS = 2**20  # each has its own signals

_lock = threading.Lock()


class CommOverlapType(Named):
    """The communication: none, sums to the ranks of their rows, or rows to all ranks."""

    NONE = 0
    RS = 1
    AG = 2


class CommOverlapMethod(Named):
    """The method: no overlap, during an independent GEMM, by column chunks, or in a ring."""

    NONE = 0
    BULK = 1
    PIPELINE = 2
    RING_EXCHANGE = 3


@dataclasses.dataclass(frozen=True)
class CommOverlapConfig:
    """How a GEMM communicates: all parameters of a buffer (see `create_comm_overlap_buffer`).

    Equal ones share an id. Without a shape, no buffer is registered: XLA allocates the memory of
    each call. With a type, method NONE then communicates without overlap.
    """

    comm_type: CommOverlapType = CommOverlapType.NONE
    method: CommOverlapMethod = CommOverlapMethod.NONE
    buffer_shape: tuple[int, int] | None = None
    buffer_dtype: str = "float32"
    tp_size: int = 1
    num_splits: int = 4
    num_max_streams: int = 3
    comm_cga_size: int = 1
    gemm_priority: int = 0
    comm_priority: int = 0
    num_comm_sm: int = 1
    set_sm_margin: bool = False
    use_ce: bool = True
    atomic_gemm: bool = False
    rs_overlap_first_gemm: bool = False
    aggregate_ag: bool = False

    @property
    def text(self) -> str:
        """Every parameter by name; the same in every process."""
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return ", ".join(f"{name}={value}" for name, value in pairs)

    @property
    def id(self) -> int:
        """A positive number of 63 bits: a hash of all parameters; 0 without a registered buffer."""
        if self.buffer_shape is None:
            return 0
        digest = hashlib.blake2b(self.text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % (2**63 - 1) + 1

    @property
    def gathers(self) -> bool:
        return self.comm_type == CommOverlapType.AG

    @property
    def is_bulk(self) -> bool:
        return self.method == CommOverlapMethod.BULK

    @property
    def is_ring(self) -> bool:
        return self.method == CommOverlapMethod.RING_EXCHANGE

    @property
    def is_sum(self) -> bool:
        """Whether partial sums of the product move."""
        return self.comm_type == CommOverlapType.RS and not self.is_bulk

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank."""
        if self.comm_type == CommOverlapType.NONE or self.buffer_shape is None:
            return 0
        rows, columns = self.buffer_shape
        return runtime.native.overlap_buffer_bytes(
            self,
            num_ranks=self.tp_size,
            shape=(rows, -(-rows // self.tp_size), columns),
            dtype=self.buffer_dtype,
            has_scales=self.is_ring and self.buffer_dtype in BYTE_FLOATS,
            # Without copies each rank reads the others' rows in place; scales always move.
            gathers_to_aux=self.is_ring and not self.use_ce,
        )


_configs: dict[int, CommOverlapConfig] = {}


class CommOverlapBuffer(NamedTuple):
    """A buffer of this process, and its usage.

    Attributes:
      config: the parameters with which it was created.
      num_created: references: times created minus times destroyed.
      num_in_use: calls in flight.
      num_calls: calls so far.
      num_bytes: memory that it holds for all ranks of this process.
    """

    config: CommOverlapConfig
    num_created: int
    num_in_use: int
    num_calls: int
    num_bytes: int


def create_comm_overlap_buffer(
    comm_type: CommOverlapType | str,
    method: CommOverlapMethod | str,
    buffer_shape: Sequence[int],
    buffer_dtype: Any,
    tp_size: int,
    *,
    num_splits: int = 4,
    num_max_streams: int = 3,
    comm_cga_size: int | None = None,
    gemm_priority: int = 0,
    comm_priority: int = 0,
    num_comm_sm: int | None = None,
    set_sm_margin: bool | None = None,
    use_ce: bool | None = None,
    atomic_gemm: bool = False,
    rs_overlap_first_gemm: bool = False,
    aggregate_ag: bool = False,
) -> int:
    """Creates a communication buffer, which any number of programs can use by its id.

    The id is a hash of all arguments, the same in every process. Equal arguments share one buffer,
    which exists until it has been destroyed as often as it was created. The first call that uses
    the buffer allocates its memory, once for each group of ranks. Creation and tracing allocate
    nothing. Calls of one group on the same buffer run in sequence.

    Call on the host, from any thread, in every process that runs the program.

    Args:
      comm_type: RS, AG or NONE; a member or its name.
      method: BULK, PIPELINE (RS only) or RING_EXCHANGE; NONE with comm_type NONE.
      buffer_shape: rows and columns; for AG of the gathered lhs, for RS of the whole output.
      buffer_dtype: dtype of the stored and moved data. For AG, that of lhs. For RS, float32 for
        partial sums, or a narrower type to which each is rounded.
      tp_size: ranks of a group.
      num_splits: column chunks of the pipeline.
      num_max_streams, comm_cga_size: parameters of Transformer Engine's userbuffers. They are part
        of the id and have no other effect on any platform: a rank has one stream for computation
        and one for communication, and its kernels use no thread block clusters.
      gemm_priority, comm_priority: priorities of the two streams of a GPU; 0 is the lowest. On CPU
        these and the next two are only part of the id.
      num_comm_sm, set_sm_margin: multiprocessors for communication, and whether the GEMM leaves
        them free. None: 16 and True; for the ring 1 and False.
      use_ce: of the ring. True, or None: chunks move by separate copies (copy engine, or memcpy on
        CPU) while the GEMM runs. False: the GEMM reads the memory of other ranks.
      atomic_gemm: run all GEMMs as one step of the schedule, which signals or waits for each chunk
        by a counter; otherwise each is a separate step. On GPUs they stay separate. In `gemm` it
        also selects the order of the ring's chunks; in a reduce-scatter with use_ce=False, which
        has no chunks, this is its only effect.
      rs_overlap_first_gemm: the pipeline reduces a chunk only when the GEMM of the next chunk is
        also finished; the result is the same.
      aggregate_ag: the ring's all-gather moves two chunks at a time; needs an even tp_size, and
        use_ce.
    Returns:
      The id, a positive int.
    Raises:
      TypeError, ValueError: an argument is invalid, or does not match another.
    """
    config = read_config("create_comm_overlap_buffer", **locals())
    with _lock:
        runtime.native.create_overlap_buffer("create_comm_overlap_buffer", config)
        runtime.restore_buffer(config.id)
        _configs[config.id] = config
    return config.id


def destroy_comm_overlap_buffer(buffer: int) -> None:
    """Releases one reference to a buffer; the last one frees its memory.

    Programs that use a freed buffer fail. Call on the host, from any thread, after the calls that
    use the buffer have finished.

    Args:
      buffer: the id.
    Raises:
      ValueError: calls in flight use the buffer; or it was destroyed or never existed.
    """
    op = "destroy_comm_overlap_buffer"
    with _lock:
        runtime.native.destroy_overlap_buffer(op, check_id(op, buffer))
        if buffer not in runtime.native.list_overlap_buffers():
            runtime.release_buffer(buffer)


def destroy_all_comm_overlap_buffers() -> None:
    """Destroys all buffers of this process, or none if calls in flight use any of them.

    Raises:
      ValueError: calls in flight use buffers; the message names them.
    """
    with _lock:
        buffers = runtime.native.list_overlap_buffers()
        runtime.native.destroy_all_overlap_buffers("destroy_all_comm_overlap_buffers")
        for buffer in buffers:
            runtime.release_buffer(buffer)


def list_comm_overlap_buffers() -> dict[int, CommOverlapBuffer]:
    """Returns a snapshot of this process's buffers, by id."""
    with _lock:
        return {
            id: CommOverlapBuffer(
                config := _configs[id],
                *counts,
                num_bytes=num_groups * config.tp_size * config.rank_bytes,
            )
            for id, (*counts, num_groups) in runtime.native.list_overlap_buffers().items()
        }


def comm_overlap_buffer_bytes(
    comm_type: CommOverlapType | str,
    method: CommOverlapMethod | str,
    buffer_shape: Sequence[int],
    buffer_dtype: Any,
    tp_size: int,
    **parameters: Any,
) -> int:
    """Returns the bytes that a buffer would take on each rank.

    This is the whole array of `buffer_shape`, and space for scales if it is 8-bit. The ring's
    reduce-scatter has 2 tp_size - 1 blocks of rows. With use_ce=False a ring stores only scales.

    Args:
      comm_type, method, buffer_shape, buffer_dtype, tp_size, parameters: as for
        `create_comm_overlap_buffer`.
    Raises:
      TypeError, ValueError: as in `create_comm_overlap_buffer`.
    """
    op = "comm_overlap_buffer_bytes"
    first = (comm_type, method, buffer_shape, buffer_dtype, tp_size)
    try:
        given = inspect.signature(create_comm_overlap_buffer).bind(*first, **parameters)
    except TypeError as error:
        raise TypeError(f"{op}: {error}; see create_comm_overlap_buffer.") from None
    given.apply_defaults()
    return read_config(op, **given.arguments).rank_bytes


# ---- Checks.


def find_buffer(op: str, buffer: int) -> CommOverlapConfig:
    runtime.native.find_overlap_buffer(op, check_id(op, buffer))
    with _lock:
        return _configs[buffer]


def check_id(op: str, buffer: Any) -> int:
    if isinstance(buffer, bool) or not isinstance(buffer, int) or not 0 < buffer < 2**63:
        raise ValueError(
            f"{op}: buffer is {buffer!r}; it needs to be the int that create_comm_overlap_buffer "
            "returned."
        )
    return buffer


def check_buffer(
    op: str, config: CommOverlapConfig, shape: tuple[int, int], dtype: str, num_ranks: int
) -> None:
    """Requires that ranks, type and shape of a buffer are those of the call."""
    if config.tp_size != num_ranks:
        raise ValueError(
            f"{op}: buffer {config.id} is for tp_size={config.tp_size} but the mesh axis has "
            f"{num_ranks} devices. Create one with tp_size={num_ranks}."
        )
    # Partial sums may be stored in float32, or rounded to a narrower type.
    allowed = FLOATS[:3] if config.is_sum and dtype != "float64" else (dtype,)
    if config.buffer_dtype not in allowed:
        raise ValueError(
            f"{op}: buffer {config.id} is {config.buffer_dtype} but the call moves {dtype}. Create "
            f"one with buffer_dtype={dtype!r}."
        )
    needed = dataclasses.replace(config, buffer_shape=shape).rank_bytes
    room = math.prod(config.buffer_shape or ())
    if room < math.prod(shape) or config.rank_bytes < needed:
        raise ValueError(
            f"{op}: buffer {config.id} has shape {config.buffer_shape} but the call needs "
            f"{shape}. Create one with buffer_shape={shape}."
        )


_RING_DEFAULTS = {"comm_cga_size": 1, "num_comm_sm": 1, "set_sm_margin": False, "use_ce": True}
_OTHER_DEFAULTS = {"comm_cga_size": 2, "num_comm_sm": 16, "set_sm_margin": True, "use_ce": False}


def read_config(op: str, **given: Any) -> CommOverlapConfig:
    """Returns the checked parameters, with the method's defaults in place of None.

    `given` are arguments of `create_comm_overlap_buffer`; others have the defaults of the record.
    """
    comm_type = CommOverlapType.read(op, "comm_type", given["comm_type"])
    method = CommOverlapMethod.read(op, "method", given["method"])
    is_ring = method == CommOverlapMethod.RING_EXCHANGE
    of_method = _RING_DEFAULTS if is_ring else _OTHER_DEFAULTS
    given |= {name: value for name, value in of_method.items() if given.get(name) is None}
    given |= {"comm_type": comm_type, "method": method}
    shape, dtype = given["buffer_shape"], dtype_name(given["buffer_dtype"])
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if len(sizes) != 2:
        raise ValueError(
            f"{op}: buffer_shape is {shape!r}; it needs two sizes: the gathered lhs of an "
            "all-gather, the whole output of a reduce-scatter, collapsed to rows and columns."
        )
    given["buffer_shape"] = tuple(_integer(op, "buffer_shape", size, 1) for size in sizes)
    allowed = FLOATS + BYTE_FLOATS if comm_type == CommOverlapType.AG else FLOATS
    if dtype not in allowed:
        raise ValueError(
            f"{op}: buffer_dtype is {dtype} with {comm_type}; it needs to be one of {allowed}."
        )
    given["buffer_dtype"] = dtype
    limits: dict[str, Any] = dict.fromkeys(("gemm_priority", "comm_priority"), ())
    limits |= dict.fromkeys(("tp_size", "num_max_streams", "comm_cga_size", "num_comm_sm"), (1,))
    limits["num_splits"] = 1, _MOST_SPLITS
    for name, bounds in limits.items():
        if name in given:
            given[name] = _integer(op, name, given[name], *bounds)
    for name in ("set_sm_margin", "use_ce", "atomic_gemm", "rs_overlap_first_gemm", "aggregate_ag"):
        check_flag(op, name, given.get(name, False))
    config = CommOverlapConfig(**given)
    _check_combination(op, config)
    return config


def check_flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be True or False.")


def _check_combination(op: str, config: CommOverlapConfig) -> None:
    kind, method = config.comm_type, config.method
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
    is_ring, is_pipeline = config.is_ring, method == CommOverlapMethod.PIPELINE
    num_bytes = math.prod(config.buffer_shape or ()) * jnp.dtype(config.buffer_dtype).itemsize
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
