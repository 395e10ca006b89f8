"""One gemm: its static parts, its operands and results, and their shapes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.options import CollectiveOptions, find_ranks
from jax_cp_dispatch.comm_gemm.buffers import (
    CommOverlapConfig,
    FoundBuffer,
    check_buffer,
    find_buffer,
)
from jax_cp_dispatch.comm_gemm.quantize import BlockLayout, tiles_shape
from jax_cp_dispatch.comm_gemm.types import CommOverlapMethod, CommOverlapType, ScalingMode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """How a gemm communicates.

    Attributes:
      comm_type, method: with a type, method NONE communicates without overlap.
      num_splits, atomic, overlap_first_gemm, aggregate, use_ce: see `create_comm_overlap_buffer`.
      buffer: id of the registered buffer; 0: XLA allocates memory for each call.
      partial_dtype: name of the type in which partial sums are stored and moved.
      gemm_priority, comm_priority, num_comm_sm, set_sm_margin: of the streams of a GPU.
    """

    comm_type: CommOverlapType = CommOverlapType.NONE
    method: CommOverlapMethod = CommOverlapMethod.NONE
    num_splits: int = 4
    atomic: bool = False
    overlap_first_gemm: bool = False
    aggregate: bool = False
    use_ce: bool = True
    buffer: int = 0
    partial_dtype: str = "float32"
    gemm_priority: int = 0
    comm_priority: int = 0
    num_comm_sm: int = 1
    set_sm_margin: bool = False

    @classmethod
    def of(cls, config: CommOverlapConfig, *, buffer: int) -> "Overlap":
        """Returns the part of a buffer's parameters that matters for a program."""
        return cls(
            comm_type=config.comm_type,
            method=config.method,
            num_splits=config.num_splits,
            atomic=config.atomic_gemm,
            overlap_first_gemm=config.rs_overlap_first_gemm,
            aggregate=config.aggregate_ag,
            use_ce=config.use_ce,
            buffer=buffer,
            partial_dtype=config.buffer_dtype,
            gemm_priority=config.gemm_priority,
            comm_priority=config.comm_priority,
            num_comm_sm=config.num_comm_sm,
            set_sm_margin=config.set_sm_margin,
        )


class GemmOperands(NamedTuple):
    """Operands of the handler; unused ones are None, and become one element for XLA."""

    lhs: Any
    lhs_scale_inv: Any
    rhs: Any
    rhs_scale_inv: Any
    bias: Any
    gelu_input: Any
    aux_in: Any

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "GemmOperands":
        """Makes operands from a mapping by name."""
        return cls(**{**dict.fromkeys(cls._fields), **given})


class GemmResults(NamedTuple):
    """Results of the handler; unused ones as in `GemmOperands`."""

    output: Any
    bias_grad: Any
    pre_gelu_out: Any
    aux_out: Any
    lhs_swizzled: Any
    rhs_swizzled: Any
    workspace: Any


class Shape2D(NamedTuple):
    """An array with its dimensions collapsed to two."""

    rows: int
    columns: int


def collapse(shape: tuple[int, ...], boundary: int) -> Shape2D:
    """Collapses a shape; the dimensions before `boundary` are rows."""
    return Shape2D(math.prod(shape[:boundary]), math.prod(shape[boundary:]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmCall:
    """The static parts of one gemm.

    Attributes:
      op: the public function, for messages.
      comm: the ranks; without axes the call does not communicate.
      overlap: how it communicates.
      lhs_boundary, rhs_boundary: leading dimensions that are rows.
      lhs_transposed: the contracted dimensions of lhs are its rows, not its columns.
      rhs_transposed: the contracted dimensions of rhs are its columns, not its rows.
      out_shape, out_dtype: of the output; with communication, columns are its last dimension.
      row_counts: rows of each rank's chunk, per batch.
      num_batches: batches into which every rank's rows are divided.
      in_ring_order: chunks are in the order in which the atomic ring processes them.
      gathers_to_aux: the gathered lhs is also a result.
      scaling_mode: how operands are scaled.
      fuse_bias: a bias is added. With `grad`, its gradient is a result instead: the sum of the
        output's rows with `fuse_gelu`, else the sum of the rows of rhs.
      fuse_gelu: the output is GELU of the product, which is also a result. With `grad`, the output
        is the product times GELU's derivative at `gelu_input`.
      use_split_accumulator: sum 8-bit operands in float32; for GPUs only, as CPUs always do.
    """

    op: str
    comm: Communicator
    lhs_boundary: int
    rhs_boundary: int
    out_shape: tuple[int, ...]
    out_dtype: str
    overlap: Overlap = Overlap()
    lhs_transposed: bool = False
    rhs_transposed: bool = False
    row_counts: tuple[int, ...] = ()
    num_batches: int = 1
    in_ring_order: bool = False
    gathers_to_aux: bool = False
    scaling_mode: ScalingMode = ScalingMode.NO_SCALING
    fuse_bias: bool = False
    fuse_gelu: bool = False
    grad: bool = False
    use_split_accumulator: bool = True

    def replace(self, **changes: Any) -> "GemmCall":
        return dataclasses.replace(self, **changes)

    @property
    def is_bulk(self) -> bool:
        return self.overlap.method == CommOverlapMethod.BULK

    @property
    def is_mxfp8(self) -> bool:
        return self.scaling_mode == ScalingMode.MXFP8_1D_SCALING

    @property
    def scale_layouts(self) -> tuple[BlockLayout, BlockLayout]:
        """Layouts of the scales of lhs and rhs: blocks of 32 lie along the contracted dimension."""
        return (
            "column" if self.lhs_transposed else "row",
            "row" if self.rhs_transposed else "column",
        )

    @property
    def gathers(self) -> bool:
        return self.overlap.comm_type == CommOverlapType.AG

    @property
    def moves_chunks(self) -> bool:
        """Whether chunks or partial sums move; otherwise each GEMM reads other ranks' memory."""
        is_ring = self.overlap.method == CommOverlapMethod.RING_EXCHANGE
        return not is_ring or self.overlap.use_ce

    def result_shapes(self, operands: GemmOperands) -> GemmResults:
        """Returns (shape, dtype) of each result, None for absent ones."""
        dtype = jnp.dtype(self.out_dtype)
        output = self.out_shape, dtype
        bias_grad = ((self.out_shape[-1],), dtype) if self.fuse_bias and self.grad else None
        pre_gelu = output if self.fuse_gelu and not self.grad else None
        lhs_swizzled = rhs_swizzled = None
        if self.is_mxfp8:
            lhs = collapse(operands.lhs.shape, self.lhs_boundary)
            rhs = collapse(operands.rhs.shape, self.rhs_boundary)
            k, m = lhs if self.lhs_transposed else lhs[::-1]
            n = rhs.rows if self.rhs_transposed else rhs.columns
            tiles = lambda lines: (tiles_shape(lines, k), np.dtype(np.uint8))
            rhs_swizzled = tiles(n)
            if self.gathers_to_aux or not self.gathers or self.is_bulk:
                gathers = self.gathers and not self.is_bulk
                lhs_swizzled = tiles(self.num_batches * sum(self.row_counts) if gathers else m)
        aux, workspace = self._aux(operands), self._workspace(operands)
        return GemmResults(output, bias_grad, pre_gelu, aux, lhs_swizzled, rhs_swizzled, workspace)

    def _aux(self, operands: GemmOperands):
        lhs = operands.lhs
        if self.is_bulk:
            x = operands.aux_in
            rows = sum(self.row_counts) if self.gathers else max(self.row_counts)
            return (*x.shape[:-2], rows, x.shape[-1]), x.dtype
        if self.gathers and self.in_ring_order:  # written even if not requested
            return lhs.shape, lhs.dtype
        return self._gathered(lhs) if self.gathers_to_aux else None

    def _gathered(self, lhs):
        return (*lhs.shape[:-2], sum(self.row_counts), lhs.shape[-1]), lhs.dtype

    def _workspace(self, operands: GemmOperands):
        """Returns the memory for chunks, if no buffer is registered."""
        overlap = self.overlap
        if self.is_bulk or overlap.comm_type == CommOverlapType.NONE:
            return None
        is_scaled = self.scaling_mode != ScalingMode.NO_SCALING
        is_sum = overlap.comm_type == CommOverlapType.RS
        moved = jnp.dtype(overlap.partial_dtype) if is_sum else operands.lhs.dtype
        num_bytes = 0
        if not overlap.buffer:
            num_bytes = runtime.native.overlap_buffer_bytes(
                overlap,
                num_ranks=self.comm.num_ranks,
                shape=(
                    self.num_batches * sum(self.row_counts),
                    self.num_batches * max(self.row_counts),
                    self.out_shape[-1] if is_sum else operands.lhs.shape[-1],
                ),
                dtype=moved.name,
                has_scales=is_scaled and not is_sum,
                gathers_to_aux=self.gathers_to_aux,
            )
        if is_sum:  # at least one element, to convey the type
            return (max(1, num_bytes // moved.itemsize),), moved
        dtype = np.dtype(np.uint8) if is_scaled else moved
        return ((num_bytes // dtype.itemsize,), dtype) if num_bytes else None

    def attributes(self, num_threads: int) -> dict[str, Any]:
        """Returns the attributes that the handler reads."""
        overlap = self.overlap
        return {
            "op": self.op,
            **self.comm.attributes(),
            "num_threads": np.int64(num_threads),
            "scaling_mode": np.int64(self.scaling_mode),
            "comm_overlap_method": np.int64(overlap.method),
            "comm_type": np.int64(overlap.comm_type),
            "comm_overlap_id": np.int64(overlap.buffer),
            "num_splits": np.int64(overlap.num_splits),
            "atomic": overlap.atomic,
            "overlap_first_gemm": overlap.overlap_first_gemm,
            "aggregate": overlap.aggregate,
            "copies": overlap.use_ce,
            "lhs_axis_boundary": np.int64(self.lhs_boundary),
            "rhs_axis_boundary": np.int64(self.rhs_boundary),
            "lhs_transposed": self.lhs_transposed,
            "rhs_transposed": self.rhs_transposed,
            "fuse_bias": self.fuse_bias,
            "fuse_gelu": self.fuse_gelu,
            "grad": self.grad,
            "row_counts": np.array(self.row_counts, np.int64),
            "num_batches": np.int64(self.num_batches),
            "in_ring_order": self.in_ring_order,
            "gathers_to_aux": self.gathers_to_aux,
        }


# ---- The GEMM of one rank, on CPU and GPU, or by XLA.


# ---- The communication of a gemm with a buffer: its ranks, and the data that move.


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
