"""Tensor-parallel GEMMs that overlap with the communication of their operands or results.

Three words mean three things here:

- A **gemm** is one call on one rank: two matrices, the operations fused with their product, and the
  data that move during it. Under JAX it is the primitive `gemm_p`, in `primitive`.
- A **matmul** is the layer over all ranks: `all_gather_matmul` and `matmul_reduce_scatter`, with
  batches, uneven tokens, global arrays and derivatives. It is made of gemms, in `rank`.
- An **overlap** is how a gemm communicates: what moves, by which method, in whose memory. The
  caller names it, as options or by a registered buffer, or it is chosen, in `arguments`. It is a
  `CommOverlapConfig`, without a shape unless a buffer is registered.
"""

from jax_cp_dispatch.comm_gemm._gemm import gemm, grouped_gemm
from jax_cp_dispatch.comm_gemm.arguments import CommGemmChoice, choose_comm_gemm
from jax_cp_dispatch.comm_gemm.matmul import all_gather_matmul, matmul_reduce_scatter

__all__ = [
    "CommGemmChoice",
    "all_gather_matmul",
    "choose_comm_gemm",
    "gemm",
    "grouped_gemm",
    "matmul_reduce_scatter",
]
