"""Tensor-parallel GEMMs that overlap with the communication of their operands or results.

Three words mean three things here:

- A **gemm** is one call on one rank: two matrices, the operations fused with their product, and the
  data that move during it. Under JAX it is the primitive `gemm_p`. See `engine/`.
- A **matmul** is the layer over all ranks: `all_gather_matmul` and `matmul_reduce_scatter`, with
  batches, uneven tokens, global arrays and derivatives. It is made of gemms. See `layers/`.
- An **overlap** is how a gemm communicates: what moves, by which method, in whose memory. The
  caller names it, as options or by a registered buffer (`buffers/`), or it is chosen (`choice`).

`scaled/` contains 8-bit operands. `types` serves all of these.
"""

from jax_cp_dispatch.comm_gemm._gemm import gemm
from jax_cp_dispatch.comm_gemm._grouped_gemm import grouped_gemm
from jax_cp_dispatch.comm_gemm.buffers import (
    CommOverlapBuffer,
    CommOverlapConfig,
    comm_overlap_buffer_bytes,
    create_comm_overlap_buffer,
    destroy_all_comm_overlap_buffers,
    destroy_comm_overlap_buffer,
    list_comm_overlap_buffers,
)
from jax_cp_dispatch.comm_gemm.choice import CommGemmChoice, choose_comm_gemm
from jax_cp_dispatch.comm_gemm.matmul import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.comm_gemm.quantize import (
    DelayedScaling,
    Quantized,
    dequantize,
    pad_scales,
    quantize,
    swizzle_scales,
    unpad_scales,
    unswizzle_scales,
)
from jax_cp_dispatch.comm_gemm.scaled_operands import MatmulScaling
from jax_cp_dispatch.comm_gemm.types import CommOverlapMethod, CommOverlapType, ScalingMode

__all__ = [
    "CommGemmChoice",
    "CommOverlapBuffer",
    "CommOverlapConfig",
    "CommOverlapMethod",
    "CommOverlapType",
    "DelayedScaling",
    "MatmulScaling",
    "Quantized",
    "ScalingMode",
    "all_gather_matmul",
    "choose_comm_gemm",
    "comm_overlap_buffer_bytes",
    "create_comm_overlap_buffer",
    "dequantize",
    "destroy_all_comm_overlap_buffers",
    "destroy_comm_overlap_buffer",
    "gemm",
    "grouped_gemm",
    "list_comm_overlap_buffers",
    "matmul_reduce_scatter",
    "pad_scales",
    "quantize",
    "swizzle_scales",
    "unpad_scales",
    "unswizzle_scales",
]
