"""Communication buffers: created, listed and destroyed on the host, named by id in programs."""

import inspect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.comm_gemm.buffers.config import CommOverlapConfig, make_config
from jax_cp_dispatch.comm_gemm.types import CommOverlapMethod, CommOverlapType

_lock = threading.Lock()
_configs: dict[int, CommOverlapConfig] = {}


class CommOverlapBuffer(NamedTuple):
    """A buffer of this process and its use so far.

    Attributes:
      config: the parameters that it was created with.
      num_created: times that it was created and not yet destroyed.
      num_in_use: calls in flight.
      num_calls: calls so far.
      num_bytes: memory that it holds, for all ranks of this process together.
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
    """Creates a communication buffer, which any number of programs can name by its id.

    The id is a hash of all arguments, the same in every process. Equal arguments share one buffer;
    it is gone when it has been destroyed as often as it was created. Memory is taken by the first
    call that uses the buffer, once for each group of ranks, so nothing is allocated here, nor while
    a program is traced. Two calls of one group on the same buffer take turns.

    Call on the host, from any thread, in every process that runs the program.

    Args:
      comm_type: RS, AG or NONE; a member or its name.
      method: BULK, PIPELINE (only RS), RING_EXCHANGE; NONE with comm_type NONE.
      buffer_shape: rows and columns. AG: of the gathered lhs. RS: of the whole output.
      buffer_dtype: of what is stored and moves: lhs of an all-gather; for RS float32 partial sums,
        or a narrower type that rounds each of them.
      tp_size: ranks of a group.
      num_splits: column chunks of the pipeline.
      num_max_streams, comm_cga_size: of Transformer Engine's userbuffers. They are part of the id,
        and change nothing on any platform: a rank has one stream to compute and one to
        communicate, and its kernels form no clusters of thread blocks.
      gemm_priority, comm_priority, num_comm_sm, set_sm_margin: of GPUs, for their streams and
        multiprocessors; on CPU part of the id and nothing else. None: 16 and True; of the ring 1
        and False.
      use_ce: whether the ring moves chunks by copies of their own, a copy engine's or on CPU
        memcpy, beside the GEMM; else the GEMM itself reads the memory of the other ranks. None:
        only the ring does.
      atomic_gemm: all products are one step of the schedule, which signals or waits for each chunk
        by a counter; else each is a step of its own. On GPUs they stay apart. In `gemm` it also
        says the order in which the ring's chunks stand, and in a reduce-scatter with
        use_ce=False, which has no chunks, that alone.
      rs_overlap_first_gemm: the pipeline reduces a chunk when the next one's GEMM is over, too; the
        same result.
      aggregate_ag: the ring's all-gather moves two chunks at a time; an even tp_size, and use_ce.
    Returns:
      The id, a positive int.
    Raises:
      TypeError, ValueError: an argument is not what it needs to be, or does not go with another.
    """
    op = "create_comm_overlap_buffer"
    config = make_config(
        op,
        comm_type,
        method,
        buffer_shape,
        buffer_dtype,
        tp_size,
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
        runtime.native.create_overlap_buffer(
            op,
            config.id,
            comm_type=int(config.comm_type),
            method=int(config.method),
            num_splits=config.num_splits,
            atomic=config.atomic_gemm,
            overlap_first_gemm=config.rs_overlap_first_gemm,
            aggregate=config.aggregate_ag,
            copies=config.use_ce,
            num_ranks=config.tp_size,
            rank_bytes=config.rank_bytes,
            dtype=config.buffer_dtype,
            parameters=config.text,
        )
        runtime.restore_buffer(config.id)
        _configs[config.id] = config
    return config.id


def destroy_comm_overlap_buffer(buffer: int) -> None:
    """Destroys a buffer, the last time frees its memory; programs that name it fail from then on.

    Call on the host, from any thread, when the calls that use the buffer are over.

    Args:
      buffer: the id.
    Raises:
      ValueError: calls in flight use the buffer; it has been destroyed, or never existed.
    """
    op = "destroy_comm_overlap_buffer"
    with _lock:
        runtime.native.destroy_overlap_buffer(op, check_id(op, buffer))
        if buffer not in runtime.native.list_overlap_buffers():
            runtime.release_buffer(buffer)


def destroy_all_comm_overlap_buffers() -> None:
    """Destroys every buffer of this process, or none if a call in flight uses one of them.

    Raises:
      ValueError: calls in flight use buffers; the message names them.
    """
    with _lock:
        buffers = runtime.native.list_overlap_buffers()
        runtime.native.destroy_all_overlap_buffers("destroy_all_comm_overlap_buffers")
        for buffer in buffers:
            runtime.release_buffer(buffer)


def list_comm_overlap_buffers() -> dict[int, CommOverlapBuffer]:
    """The buffers of this process at one moment, by id."""
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
    """Bytes that a buffer takes on each rank, before it is created.

    The whole array of `buffer_shape`, with room for its scales if it is of 8 bits. The ring's
    reduce-scatter has 2 tp_size - 1 blocks of rows; with use_ce=False a ring has scales alone.

    Args:
      comm_type, method, buffer_shape, buffer_dtype, tp_size, parameters: as for
        `create_comm_overlap_buffer`.
    Raises:
      TypeError, ValueError: as there.
    """
    op = "comm_overlap_buffer_bytes"
    try:
        inspect.signature(create_comm_overlap_buffer).bind_partial(**parameters)
    except TypeError as error:
        raise TypeError(f"{op}: {error}; see create_comm_overlap_buffer.") from None
    config = make_config(op, comm_type, method, buffer_shape, buffer_dtype, tp_size, **parameters)
    return config.rank_bytes


def find_config(op: str, buffer: int) -> CommOverlapConfig:
    """The parameters of an existing buffer; `op` begins the message of an error."""
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
