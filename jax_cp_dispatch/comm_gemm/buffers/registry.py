"""Creates, lists and destroys communication buffers on the host; programs name them by id."""

import dataclasses
import inspect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.comm_gemm.buffers.config import CommOverlapConfig, check_pair, read_config
from jax_cp_dispatch.comm_gemm.types import FLOATS, CommOverlapMethod, CommOverlapType

_lock = threading.Lock()
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
      gemm_priority, comm_priority, num_comm_sm, set_sm_margin: streams and multiprocessors of GPUs;
        on CPU they are only part of the id. None: 16 and True; for the ring 1 and False.
      use_ce: whether the ring moves chunks by separate copies (copy engine, or memcpy on CPU) while
        the GEMM runs; otherwise the GEMM reads the memory of other ranks. None: only the ring
        copies.
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
    op = "create_comm_overlap_buffer"
    config = read_config(
        op,
        comm_type=comm_type,
        method=method,
        buffer_shape=buffer_shape,
        buffer_dtype=buffer_dtype,
        tp_size=tp_size,
        num_splits=num_splits,
        num_max_streams=num_max_streams,
        comm_cga_size=comm_cga_size,
        gemm_priority=gemm_priority,
        comm_priority=comm_priority,
        num_comm_sm=num_comm_sm,
        set_sm_margin=set_sm_margin,
        use_ce=use_ce,
        atomic_gemm=atomic_gemm,
        rs_overlap_first_gemm=rs_overlap_first_gemm,
        aggregate_ag=aggregate_ag,
    )
    with _lock:
        runtime.native.create_overlap_buffer(op, config)
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
                *(num_created, num_in_use, num_calls),
                num_bytes=num_groups * config.tp_size * config.rank_bytes,
            )
            for id, (
                num_created,
                num_in_use,
                num_calls,
                num_groups,
            ) in runtime.native.list_overlap_buffers().items()
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
    try:
        inspect.signature(create_comm_overlap_buffer).bind_partial(**parameters)
    except TypeError as error:
        raise TypeError(f"{op}: {error}; see create_comm_overlap_buffer.") from None
    config = read_config(
        op,
        comm_type=comm_type,
        method=method,
        buffer_shape=buffer_shape,
        buffer_dtype=buffer_dtype,
        tp_size=tp_size,
        **parameters,
    )
    return config.rank_bytes


class FoundBuffer(NamedTuple):
    """A buffer that a call names, and its parameters."""

    id: int
    config: CommOverlapConfig


def find_buffer(op: str, buffer: int) -> FoundBuffer:
    """Returns an existing buffer; `op` is for error messages."""
    runtime.native.find_overlap_buffer(op, check_id(op, buffer))
    with _lock:
        return FoundBuffer(buffer, _configs[buffer])


def check_id(op: str, buffer: Any) -> int:
    if isinstance(buffer, bool) or not isinstance(buffer, int) or not 0 < buffer < 2**63:
        raise ValueError(
            f"{op}: buffer is {buffer!r}; it needs to be the int that create_comm_overlap_buffer "
            "returned."
        )
    return buffer


def check_buffer(
    op: str, found: FoundBuffer, shape: tuple[int, int], dtype: str, num_ranks: int
) -> None:
    """Requires that ranks, type and shape of a buffer are those of the call."""
    buffer, config = found
    check_pair(op, config.comm_type, config.method)
    if config.tp_size != num_ranks:
        raise ValueError(
            f"{op}: buffer {buffer} is for tp_size={config.tp_size} but the mesh axis has "
            f"{num_ranks} devices. Create one with tp_size={num_ranks}."
        )
    # Partial sums may be stored in float32, or rounded to a narrower type.
    is_sum = config.comm_type == CommOverlapType.RS and config.method != CommOverlapMethod.BULK
    allowed = FLOATS[:3] if is_sum and dtype != "float64" else (dtype,)
    if config.buffer_dtype not in allowed:
        raise ValueError(
            f"{op}: buffer {buffer} is {config.buffer_dtype} but the call moves {dtype}. Create "
            f"one with buffer_dtype={dtype!r}."
        )
    rows, columns = shape
    needed = dataclasses.replace(config, buffer_shape=(rows, columns)).rank_bytes
    room = config.buffer_shape[0] * config.buffer_shape[1]
    if room < rows * columns or config.rank_bytes < needed:
        raise ValueError(
            f"{op}: buffer {buffer} has shape {config.buffer_shape} but the call needs "
            f"{(rows, columns)}. Create one with buffer_shape={(rows, columns)}."
        )
