"""Invalid calls of quantize, dequantize, the byte orders of scales, and delayed scales."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import NO_PLAN, X, check_names, check_rejected

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


# Name, call, and the message after "<operation>: ".
CASES = [
    ("quantize", lambda: quantize(x=[1.0]), r"x is of type list.*Pass numpy.asarray\(x\)"),
    ("quantize", lambda: quantize(x=ROWS.astype(int)), "x is int64"),
    ("quantize", lambda: quantize(x=ROWS[None]), r"x has shape \(1, 2, 32\).* two dimensions"),
    (
        "quantize",
        lambda: quantize(x=np.zeros((2, 40), "f")),
        "dimension 1 to be a multiple of 32.* Pad .* to 64",
    ),
    (
        "quantize",
        lambda: quantize(layout="column"),
        "layout 'column' needs dimension 0 to be a multiple of 32",
    ),
    ("quantize", lambda: quantize(layout="diagonal"), "layout is 'diagonal'; it needs to be 'row'"),
    ("quantize", lambda: quantize(mode="NO_SCALING"), "mode is ScalingMode.NO_SCALING"),
    ("quantize", lambda: quantize(mode="FP8"), "mode is 'FP8'; it needs to be one of"),
    ("quantize", lambda: quantize(dtype=jnp.int8), "dtype is int8; it needs to be float8_e4m3fn"),
    ("quantize", lambda: quantize(dtype="float7"), "dtype is 'float7'"),
    (
        "quantize",
        lambda: quantize(mode=CURRENT, axis_name="cp"),
        "axis_name 'cp' is not manual here",
    ),
    ("quantize", lambda: quantize(axis_name=()), r"axis_name is \(\); it needs one mesh axis"),
    ("quantize", lambda: quantize(axis_name=5), "axis_name is 5; it needs the name"),
    (
        "quantize",
        lambda: quantize(mode=CURRENT, axis_name=5),
        "axis_name is 5; it needs the name",
    ),
    ("quantize", lambda: quantize(mode=DELAYED), r"got no state .* state=DelayedScaling.init\(\)"),
    ("quantize", lambda: quantize(state="any"), "got a state with .* Omit it"),
    ("quantize", lambda: quantize(mode=DELAYED, state=3), "type int.*DelayedScaling. Begin"),
    ("DelayedScaling", lambda: delayed(dtype=jnp.float16), "dtype is float16"),
    ("DelayedScaling.update", lambda: delayed(axis_name=5), "axis_name is 5; it needs"),
    ("dequantize", lambda: scaling.dequantize(NO_PLAN), "type ndarray.*Quantized. Pass"),
    *(
        (
            "dequantize",
            lambda dtype=dtype: dequantize(dtype),
            f"dtype is {dtype!r}; it needs to be a floating-point type. Pass jnp.float32 or ",
        )
        for dtype in ("nonsense", "int8", 5)
    ),
    ("dequantize", lambda: dequantize(mode="NO_SCALING"), "q.mode is ScalingMode.NO_SCALING"),
    ("dequantize", lambda: dequantize(data=ROWS), "q.data is float32; it needs to be float8"),
    (
        "dequantize",
        lambda: dequantize(scale_inv=np.zeros((128, 4), np.uint8)),
        r"uint8\[128, 4\]; .* uint8\[2, 1\]",
    ),
    (
        "dequantize",
        lambda: dequantize(scale_inv=np.ones(1, "f")),
        r"float32\[1\]; .* uint8\[2, 1\].* unpadded",
    ),
    ("dequantize", lambda: dequantize(mode=CURRENT), r"uint8\[2, 1\]; .* float32\[1\]"),
    (
        "dequantize",
        lambda: dequantize(layout="column"),
        "q.data has shape .* layout 'column' needs dimension 0",
    ),
    ("pad_scales", lambda: layout_of("pad_scales", "row", [[1]]), "scales is of type list"),
    ("swizzle_scales", lambda: layout_of("swizzle_scales", "row", X), r"\(4, 6, 2\).*\[r, c\]"),
    (
        "swizzle_scales",
        lambda: layout_of("swizzle_scales", "row"),
        r"multiples of \(128, 4\). Call pad_scales first",
    ),
    (
        "swizzle_scales",
        lambda: layout_of("swizzle_scales", "column"),
        r"multiples of \(4, 128\)",
    ),
    ("unswizzle_scales", lambda: layout_of("unswizzle_scales", "row", X), r"\(4, 6, 2\).*512"),
    *(
        (name, lambda name=name: layout_of(name, "both"), "layout is 'both'")
        for name in ("pad_scales", "swizzle_scales", "unswizzle_scales")
    ),
    ("unpad_scales", lambda: unpad(3), "shape is 3; it needs to be a tuple"),
    ("unpad_scales", lambda: unpad((1.5, 2)), "entry of shape is 1.5; it needs"),
    *(
        (
            "unpad_scales",
            lambda rows=rows: unpad((rows, 4)),
            rf"shape is \({rows}, 4\); it needs sizes from 0 to .*\(130, 4\)",
        )
        for rows in (131, -1)
    ),
]


def test_the_list_is_of_public_functions():
    check_names(CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    check_rejected(*CASES[index])
