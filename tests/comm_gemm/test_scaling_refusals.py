"""Invalid calls of quantize, dequantize, the byte orders of scales, and delayed scales."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import NO_PLAN, X, check_names, check_rejected, each

from jax_cp_dispatch import scaling
from jax_cp_dispatch.scaling import DelayedScaling, Quantized

pytestmark = pytest.mark.usefixtures("unchecked_types")

CURRENT, DELAYED = "CURRENT_TENSOR_SCALING", "DELAYED_TENSOR_SCALING"
MXFP8 = "MXFP8_1D_SCALING"
ROWS: Any = np.zeros((2, 32), np.float32)
SCALES: Any = np.zeros((130, 4), np.uint8)


def quantize(**arguments: Any):
    return scaling.quantize(**{"x": ROWS, "mode": MXFP8, **arguments})


def dequantize(dtype: Any = "float32", **change: Any):
    fields: dict[str, Any] = {
        "data": np.zeros((2, 32), "float8_e4m3fn"),
        "scale_inv": np.zeros((2, 1), np.uint8),
        "mode": MXFP8,
        "layout": "row",
    }
    mode = scaling.ScalingMode[change.pop("mode", MXFP8)]
    return scaling.dequantize(Quantized(**{**fields, **change, "mode": mode}), dtype)


def delayed(**arguments: Any):
    return DelayedScaling.init().update(ROWS, **arguments)


def layout_of(name: str, layout: str, scales: Any = SCALES, **arguments: Any):
    return getattr(scaling, name)(scales, layout=layout, **arguments)


def unpad(shape: Any):
    return scaling.unpad_scales(SCALES, shape=shape)


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "quantize": [
        (lambda: quantize(x=[1.0]), r"x is of type list.*Pass numpy.asarray\(x\)"),
        (lambda: quantize(x=ROWS.astype(int)), "x is int64"),
        (lambda: quantize(x=ROWS[None]), r"x has shape \(1, 2, 32\).* two dimensions"),
        (lambda: quantize(x=np.zeros((2, 40), "f")), "dimension 1 to be a multiple of 32.* Pad"),
        (lambda: quantize(layout="column"), "layout 'column' needs dimension 0 to be a multiple"),
        (lambda: quantize(layout="diagonal"), "layout is 'diagonal'; it needs to be 'row'"),
        (lambda: quantize(mode="NO_SCALING"), "mode is ScalingMode.NO_SCALING"),
        (lambda: quantize(mode="FP8"), "mode is 'FP8'; it needs to be one of"),
        (lambda: quantize(dtype=jnp.int8), "dtype is int8; it needs to be float8_e4m3fn"),
        (lambda: quantize(dtype="float7"), "dtype is 'float7'"),
        (lambda: quantize(mode=CURRENT, axis_name="cp"), "axis_name 'cp' is not manual here"),
        (lambda: quantize(axis_name=()), r"axis_name is \(\); it needs one mesh axis"),
        (lambda: quantize(axis_name=5), "axis_name is 5; it needs the name"),
        (lambda: quantize(mode=CURRENT, axis_name=5), "axis_name is 5; it needs the name"),
        (lambda: quantize(mode=DELAYED), r"got no state .* state=DelayedScaling.init\(\)"),
        (lambda: quantize(state="any"), "got a state with .* Omit it"),
        (lambda: quantize(mode=DELAYED, state=3), "type int.*DelayedScaling. Begin"),
    ],
    "DelayedScaling": [(lambda: delayed(dtype=jnp.float16), "dtype is float16")],
    "DelayedScaling.update": [(lambda: delayed(axis_name=5), "axis_name is 5; it needs")],
    "dequantize": [
        (lambda: scaling.dequantize(NO_PLAN), "type ndarray.*Quantized. Pass"),
        *(
            (
                lambda dtype=dtype: dequantize(dtype),
                f"dtype is {dtype!r}; it needs to be a floating-point type. Pass jnp.float32 or ",
            )
            for dtype in ("nonsense", "int8", 5)
        ),
        (lambda: dequantize(mode="NO_SCALING"), "q.mode is ScalingMode.NO_SCALING"),
        (lambda: dequantize(data=ROWS), "q.data is float32; it needs to be float8"),
        (
            lambda: dequantize(scale_inv=np.zeros((128, 4), np.uint8)),
            r"uint8\[128, 4\]; .* uint8\[2, 1\]",
        ),
        (lambda: dequantize(scale_inv=np.ones(1, "f")), r"float32\[1\]; .* uint8\[2, 1\]"),
        (lambda: dequantize(mode=CURRENT), r"uint8\[2, 1\]; .* float32\[1\]"),
        (lambda: dequantize(layout="column"), "q.data has shape .* layout 'column' needs"),
    ],
    "pad_scales": [
        (lambda: layout_of("pad_scales", "row", [[1]]), "scales is of type list"),
        (lambda: layout_of("pad_scales", "both"), "layout is 'both'"),
    ],
    "swizzle_scales": [
        (lambda: layout_of("swizzle_scales", "row", X), r"\(4, 6, 2\).*\[r, c\]"),
        (lambda: layout_of("swizzle_scales", "row"), r"multiples of \(128, 4\). Call pad_scales"),
        (lambda: layout_of("swizzle_scales", "column"), r"multiples of \(4, 128\)"),
        (lambda: layout_of("swizzle_scales", "both"), "layout is 'both'"),
    ],
    "unswizzle_scales": [
        (lambda: layout_of("unswizzle_scales", "row", X), r"\(4, 6, 2\).*512"),
        (lambda: layout_of("unswizzle_scales", "both"), "layout is 'both'"),
    ],
    "unpad_scales": [
        (lambda: unpad(3), "shape is 3; it needs to be a tuple"),
        (lambda: unpad((1.5, 2)), "entry of shape is 1.5; it needs"),
        *(
            (
                lambda rows=rows: unpad((rows, 4)),
                rf"shape is \({rows}, 4\); it needs sizes from 0 to .*\(130, 4\)",
            )
            for rows in (131, -1)
        ),
    ],
}


def test_the_list_is_of_public_functions():
    check_names(CASES)


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)
