"""The communication of a gemm with a buffer: its ranks, and the data that move."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.options import CollectiveOptions, find_ranks
from jax_cp_dispatch.comm_gemm.buffers.registry import FoundBuffer, check_buffer, find_buffer
from jax_cp_dispatch.comm_gemm.engine.gemm_call import GemmCall, Overlap
from jax_cp_dispatch.comm_gemm.types import CommOverlapMethod, CommOverlapType


def find_gemm_ranks(options: CollectiveOptions, arrays: Sequence[Any]) -> Communicator:
    """Returns the ranks on the mesh axis around this one."""
    comm, context = find_ranks(options, arrays)
    if context.is_global:
        name = options.axis_name
        raise ValueError(
            f"{options.op}: axis_name is {name!r}, but this is not inside jax.shard_map over it. "
            "Call it there, or use all_gather_matmul or matmul_reduce_scatter on global arrays."
        )
    return comm


def with_overlap(
    call: GemmCall,
    lhs: Array,
    aux_in: Any,
    *,
    found: FoundBuffer,
    paired: int | None,
    return_aux: bool,
) -> GemmCall:
    """Returns the call with its buffer's overlap, checked against lhs or the moved array."""
    op, (buffer, config) = call.op, found
    kind, method = config.comm_type, config.method
    is_bulk, gathers = method == CommOverlapMethod.BULK, kind == CommOverlapType.AG
    if is_bulk != (aux_in is not None):
        raise ValueError(
            f"{op}: got {'no' if is_bulk else 'an'} aux_in with buffer {buffer} of {method}; "
            "an array that moves during an independent GEMM needs CommOverlapMethod.BULK, and "
            f"vice versa. {'Pass one.' if is_bulk else 'Omit it, or create that buffer.'}"
        )
    if call.fuse_gelu and (is_bulk or not gathers):
        raise ValueError(
            f"{op}: got fuse_gelu with {kind}, {method}; GELU needs a complete sum, and cannot "
            "run during a bulk transfer. Apply jax.nn.gelu afterwards."
        )
    if return_aux and not gathers:
        raise ValueError(f"{op}: got return_aux with {kind}; only an all-gather has one.")
    if call.lhs_transposed and not is_bulk:
        raise ValueError(
            f"{op}: lhs contracts its first dimensions; its chunks are rows, so with {kind} the "
            "last ones need to be contracted. Transpose it."
        )
    p = call.comm.num_ranks
    moved, name = (aux_in, "aux_in") if is_bulk else (lhs, "lhs")
    if moved.ndim != 2:
        raise ValueError(f"{op}: {name} has shape {moved.shape}; it needs two dimensions.")
    rows = moved.shape[0]
    if not gathers and rows % p:
        raise ValueError(
            f"{op}: {rows} rows of {name} are not a multiple of the {p} ranks. Pad them, or use "
            "matmul_reduce_scatter with row_counts."
        )
    total = rows * p if gathers else rows
    columns = moved.shape[1] if is_bulk or gathers else call.out_shape[1]
    wide = sum_dtype(call.out_dtype).name
    dtype = moved.dtype.name if is_bulk or gathers else wide
    check_buffer(op, found, (total, columns), dtype, p)
    in_ring_order = config.atomic_gemm and method == CommOverlapMethod.RING_EXCHANGE
    if in_ring_order and gathers:
        _check_pair(op, buffer, paired, p)
    overlap = Overlap.of(config, buffer=buffer)
    out_rows = call.out_shape[0]
    if not is_bulk:
        out_rows = total if gathers else rows // p
    return call.replace(
        overlap=overlap,
        out_shape=(out_rows, call.out_shape[1]),
        row_counts=(total // p,) * p,
        in_ring_order=in_ring_order,
        gathers_to_aux=gathers and not is_bulk and not in_ring_order and return_aux,
    )


def _check_pair(op: str, buffer: int, paired: int | None, num_ranks: int) -> None:
    ring = (CommOverlapType.RS, CommOverlapMethod.RING_EXCHANGE, True, num_ranks)
    other = None if paired is None else find_buffer(op, paired).config
    found = other and (other.comm_type, other.method, other.atomic_gemm, other.tp_size)
    if found != ring:
        raise ValueError(
            f"{op}: the atomic ring of buffer {buffer} leaves chunks in the order r-1, r-2, "
            f"..., r, and is paired with {other.text if other else 'nothing'}; only an atomic "
            f"RING_EXCHANGE of CommOverlapType.RS with tp_size={num_ranks} consumes chunks in that "
            "order. Pass its id: paired_comm_overlap=..."
        )
