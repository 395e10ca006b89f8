"""Tensor-parallel GEMMs that overlap with the communication of their operands or results."""

from jax_cp_dispatch.comm_gemm.choose import CommGemmChoice, choose_comm_gemm
from jax_cp_dispatch.comm_gemm.config import (
    CommOverlapConfig,
    CommOverlapMethod,
    CommOverlapType,
    ScalingMode,
)
from jax_cp_dispatch.comm_gemm.gemm import gemm
from jax_cp_dispatch.comm_gemm.grouped_gemm import grouped_gemm
from jax_cp_dispatch.comm_gemm.matmul import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.comm_gemm.measure import tune
from jax_cp_dispatch.comm_gemm.mxfp8 import (
    pad_scales,
    swizzle_scales,
    unpad_scales,
    unswizzle_scales,
)
from jax_cp_dispatch.comm_gemm.overlap_profile import OverlapProfile, overlap_profile
from jax_cp_dispatch.comm_gemm.registry import (
    CommOverlapBuffer,
    comm_overlap_buffer_bytes,
    create_comm_overlap_buffer,
    destroy_all_comm_overlap_buffers,
    destroy_comm_overlap_buffer,
    list_comm_overlap_buffers,
)
from jax_cp_dispatch.comm_gemm.scaled_operands import MatmulScaling
from jax_cp_dispatch.comm_gemm.scaling import DelayedScaling, Quantized, dequantize, quantize
from jax_cp_dispatch.comm_gemm.tuning import TuningTable, current_tuning, use_tuning

__all__ = [
    "CommGemmChoice",
    "CommOverlapBuffer",
    "CommOverlapConfig",
    "CommOverlapMethod",
    "CommOverlapType",
    "DelayedScaling",
    "MatmulScaling",
    "OverlapProfile",
    "Quantized",
    "ScalingMode",
    "TuningTable",
    "all_gather_matmul",
    "choose_comm_gemm",
    "comm_overlap_buffer_bytes",
    "create_comm_overlap_buffer",
    "current_tuning",
    "dequantize",
    "destroy_all_comm_overlap_buffers",
    "destroy_comm_overlap_buffer",
    "gemm",
    "grouped_gemm",
    "list_comm_overlap_buffers",
    "matmul_reduce_scatter",
    "overlap_profile",
    "pad_scales",
    "quantize",
    "swizzle_scales",
    "tune",
    "unpad_scales",
    "unswizzle_scales",
    "use_tuning",
]
