"""The static description of how one gemm communicates."""

import dataclasses

from jax_cp_dispatch.comm_gemm.buffers.config import CommOverlapConfig
from jax_cp_dispatch.comm_gemm.types import CommOverlapMethod, CommOverlapType


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
