"""Local attention lowered for CUDA without a GPU: the cuDNN calls and their options.

Programs run with emulated cuDNN calls; on a GPU, `gpu/test_gpu_attention.py` compares results.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, attention_gradients
from cudnn_emulation import Backward, Forward
from local_cases import RANGES, assert_close, inputs

from jax_cp_dispatch import local_attention
from jax_cp_dispatch.attention.local import cudnn, uncut
from jax_cp_dispatch.attention.local.local_options import LocalOptions

SHAPES: Any = {"B": 1, "T": 256, "S": 256, "N": 4, "K": 2, "H": 64, "Hv": 64}


@pytest.mark.parametrize("dense", ["causal", "full"])
def test_values_and_gradients(dense, monkeypatch):
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_fwd_p", Forward)
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_bwd_p", Backward)
    q, k, v, dout, dlse = inputs(0, T=37, S=37)
    start, end = RANGES[dense](2, 37, 37)
    float32 = jnp.dtype("float32")
    options = dataclasses.replace(
        LocalOptions("test").resolved(q, k, v),
        **{"dense": dense, "out_dtype": float32, "gradient_dtypes": (float32,) * 3},
    )
    ranges = uncut.RowRanges(start, end)
    out, lse = cudnn.attend(options, uncut.Forward(q, k, v, ranges, None))
    whole = uncut.SoftmaxGradients(out, lse, dout)
    actual = out, lse, *cudnn.gradients(options, uncut.Backward(q, k, v, ranges, whole))
    wanted = attention(q, k, v, start, end)
    wanted += tuple(attention_gradients(q, k, v, start, end, dout, 0 * dlse))
    for x, y in zip(actual, wanted, strict=True):
        assert_close(x, y, 1e-5)


# ---- Lowering.


def text_of(fn, *arguments, platform="cuda"):
    return jax.jit(fn).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def cudnn_calls(fn, *arguments, platform="cuda"):
    """Returns (target, mask) of each call, in program order."""
    text = text_of(fn, *arguments, platform=platform)
    calls = (line for line in text.splitlines() if "custom_call @__cudnn$" in line)
    found = [re.search(r"@__cudnn\$(\w+)\(.*mask_type[^A-Z]+([A-Z_]+)", call) for call in calls]
    return [match.groups() for match in found if match]


def lower_both(shapes, dtype=jnp.bfloat16, platform="cuda", use_lse=False, **options: Any):
    """Returns the calls of the forward pass, and those of both passes."""
    q, k, v, *_ = inputs(5, **(SHAPES | shapes), dtype=dtype)
    attend = lambda q, k, v: local_attention(q, k, v, **options)
    loss = lambda *x: sum(jnp.sum(jnp.where(y > -9, y, 0)) for y in attend(*x)[: 1 + use_lse])
    return tuple(
        cudnn_calls(fn, q, k, v, platform=platform)
        for fn in (attend, jax.grad(loss, argnums=(0, 1, 2)))
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("mask, name", [(None, "CAUSAL"), ("full", "NO_MASK")])
def test_one_dense_document_goes_to_cudnn(dtype, mask, name):
    forward, backward = ("fmhaSoftmax", name), ("fmhaSoftmaxBackward", name)
    assert lower_both({}, dtype, mask=mask) == ([forward], [forward, backward])


def test_it_reads_and_writes_the_callers_arrays():
    q, k, v, *_ = inputs(5, **SHAPES, dtype=jnp.bfloat16)
    text = text_of(lambda *x: local_attention(*x, scale=0.375, out_dtype=q.dtype), q, k, v)
    (call,) = (line for line in text.splitlines() if "custom_call @__cudnn$" in line)
    query, key = "tensor<1x256x4x64xbf16>", "tensor<1x256x2x64xbf16>"
    assert f"({query}, {key}, {key}) -> (tensor<1x4x256x64xbf16>, tensor<1x4x256xf32>" in call
    assert r"fmha_scale\22: 0.375" in call
    assert "stablehlo.case" not in text


RANGES_OF_256 = dict(zip(("kv_start", "kv_end"), RANGES["causal"](1, 256, 256), strict=True))


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": jnp.float32},
        {"logit_soft_cap": 30.0},
        {"shapes": {"H": 60, "Hv": 60}},
        {"shapes": {"H": 256, "Hv": 256}},
        {"shapes": {"Hv": 32}},
        {"shapes": {"T": 128}},  # the last queries
        {"segment_ids": np.ones((1, 256), np.int32)},
        RANGES_OF_256,  # of data
        {"platform": "cpu"},
    ],
    ids=lambda case: str(list(case.items()))[:40],
)
def test_what_cudnn_does_not_compute(case):
    assert lower_both(case.pop("shapes", {}), **case) == ([], [])


def test_a_cotangent_of_the_lse_is_not_for_cudnn():
    forward, both = lower_both({}, use_lse=True)
    assert forward == both != []


def test_largest_logits_are_not_of_cudnn():
    assert lower_both({}, return_max_logits=True) == ([], [("fmhaSoftmaxBackward", "CAUSAL")])
