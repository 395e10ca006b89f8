"""8-bit operands of GEMMs: scaling modes, quantization, and the layouts of block scales."""

from jax_cp_dispatch.comm_gemm import (
    DelayedScaling,
    MatmulScaling,
    Quantized,
    ScalingMode,
    dequantize,
    pad_scales,
    quantize,
    swizzle_scales,
    unpad_scales,
    unswizzle_scales,
)

__all__ = [
    "DelayedScaling",
    "MatmulScaling",
    "Quantized",
    "ScalingMode",
    "dequantize",
    "pad_scales",
    "quantize",
    "swizzle_scales",
    "unpad_scales",
    "unswizzle_scales",
]
