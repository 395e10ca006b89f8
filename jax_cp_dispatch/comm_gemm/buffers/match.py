"""Checks that a buffer matches the call that names it."""

import dataclasses

from jax_cp_dispatch.comm_gemm.buffers.config import check_pair
from jax_cp_dispatch.comm_gemm.buffers.registry import FoundBuffer
from jax_cp_dispatch.comm_gemm.types import FLOATS, CommOverlapMethod, CommOverlapType


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
