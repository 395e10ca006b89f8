"""Errors of quantize, dequantize, the byte orders and delayed scales."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_cp_dispatch.comm_gemm.scaled.mxfp8 import (
    pad_scales,
    swizzle_scales,
    unpad_scales,
    unswizzle_scales,
)
from jax_cp_dispatch.comm_gemm.scaled.quantize import (
    DelayedScaling,
    Quantized,
    dequantize,
    quantize,
)
from jax_cp_dispatch.comm_gemm.types import ScalingMode

pytestmark = pytest.mark.usefixtures("unchecked_types")

CURRENT, DELAYED = ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.DELAYED_TENSOR_SCALING
MXFP8 = ScalingMode.MXFP8_1D_SCALING


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "NO_SCALING"}, "quantize: mode is ScalingMode.NO_SCALING"),
        ({"mode": "FP8"}, "quantize: mode is 'FP8'; it needs to be one of"),
        ({"dtype": jnp.int8}, "quantize: dtype is int8; it needs to be float8_e4m3fn or"),
        ({"dtype": "float7"}, "quantize: dtype is 'float7'"),
        ({"mode": CURRENT, "axis_name": "cp"}, "quantize: axis_name 'cp' is not manual here"),
        ({"axis_name": ()}, r"quantize: axis_name is \(\); it needs one mesh axis"),
        ({"layout": "diagonal"}, "quantize: layout is 'diagonal'; it needs to be 'row'"),
        ({"mode": DELAYED}, r"quantize: got no state with .* state=DelayedScaling.init\(\)"),
        ({"state": "any"}, "quantize: got a state with .* Omit it"),
        ({"x": np.zeros((2, 32), np.int32)}, "quantize: x is int32"),
        ({"x": np.zeros((2, 2, 32), "f")}, r"quantize: x has shape \(2, 2, 32\).* two dimensions"),
        ({"x": np.zeros((2, 40), "f")}, "dimension 1 to be a multiple of 32.* Pad .* to 64"),
        ({"layout": "column"}, "layout 'column' needs dimension 0 to be a multiple of 32"),
    ],
)
def test_errors_of_quantize(arguments, message):
    arguments = {"x": np.zeros((2, 32), "f"), "mode": MXFP8, **arguments}
    with pytest.raises(ValueError, match=message):
        quantize(**arguments)


@pytest.mark.parametrize("mode", [CURRENT, MXFP8])
def test_axis_names_are_text(mode):
    x = jnp.zeros((2, 32))
    name: Any = 5
    with pytest.raises(TypeError, match="quantize: axis_name is 5; it needs the name"):
        quantize(x, mode, axis_name=name)
    with pytest.raises(TypeError, match=r"DelayedScaling\.update: axis_name is 5; it needs"):
        DelayedScaling.init().update(x, axis_name=name)


@pytest.mark.parametrize("dtype", ["nonsense", "int8", 5])
def test_values_are_floats(dtype):
    q = quantize(jnp.ones((2, 32)), MXFP8)
    needs = "it needs to be a floating-point type. Pass jnp.float32 or jnp.bfloat16"
    with pytest.raises(ValueError, match=f"dequantize: dtype is {dtype!r}; {needs}"):
        dequantize(q, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": ScalingMode.NO_SCALING}, "dequantize: q.mode is ScalingMode.NO_SCALING"),
        ({"data": np.zeros((2, 32), "f")}, "dequantize: q.data is float32; it needs to be float8"),
        ({"scale_inv": np.zeros((128, 4), np.uint8)}, r"uint8\[128, 4\]; .* uint8\[2, 1\]"),
        ({"scale_inv": np.ones(1, "f")}, r"float32\[1\]; .* uint8\[2, 1\].* unpadded"),
        ({"mode": CURRENT}, r"uint8\[2, 1\]; .* float32\[1\]"),
        ({"layout": "column"}, "q.data has shape .* layout 'column' needs dimension 0"),
    ],
)
def test_errors_of_dequantize(change, message):
    q = Quantized(
        data=np.zeros((2, 32), "float8_e4m3fn"), scale_inv=np.zeros((2, 1), np.uint8), mode=MXFP8
    )
    fields = {"data": q.data, "scale_inv": q.scale_inv, "mode": q.mode, "layout": q.layout}
    with pytest.raises(ValueError, match=message):
        dequantize(Quantized(**{**fields, **change}))


def test_errors_of_scale_bytes():
    scales = jnp.zeros((130, 4), jnp.uint8)
    with pytest.raises(ValueError, match=r"multiples of \(128, 4\). Call pad_scales first"):
        swizzle_scales(scales)
    with pytest.raises(ValueError, match=r"multiples of \(4, 128\)"):
        swizzle_scales(scales, layout="column")
    for shape in (131, 4), (-1, 4):
        needs = rf"unpad_scales: shape is \({shape[0]}, 4\); it needs sizes from 0 to .*\(130, 4\)"
        with pytest.raises(ValueError, match=needs):
            unpad_scales(scales, shape=shape)
    functions: list[Any] = [pad_scales, swizzle_scales, unswizzle_scales]
    for function in functions:
        with pytest.raises(ValueError, match=f"{function.__name__}: layout is 'both'"):
            function(scales, layout="both")
    with pytest.raises(ValueError, match=r"DelayedScaling: dtype is float16"):
        DelayedScaling.init().update(jnp.ones(3), dtype=jnp.float16)
