"""Local attention lowered for CUDA without a GPU: the cuDNN calls and their options.

Programs run with emulated cuDNN calls; on a GPU, `gpu/test_gpu_attention.py` compares results.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, attention_gradients
from cudnn_emulation import Backward, Forward
from local_cases import RANGES, assert_close, inputs, rows
from sequences import Case, check, draw

from jax_cp_dispatch.attention.local import api as local, cudnn, tiles
from jax_cp_dispatch.attention.local.api import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local.merge import merge_partials
from jax_cp_dispatch.attention.rotating import attend as rotating

BLOCKS: Any = {"block_q": 8, "block_kv": 16}
DENSE = {
    "causal": RANGES["causal"],
    "full": RANGES["full"],
    "empty": RANGES["empty"],
    "length per batch row": lambda B, T, S: rows(B, T, lambda i: 0 * i, lambda i: lengths(B, i)),
    "some queries attend nothing": lambda B, T, S: rows(
        B, T, lambda i: 0 * i, lambda i: np.where(i % 5, 31, 0)
    ),
    "causal, then nothing": lambda B, T, S: rows(
        B, T, lambda i: 0 * i, lambda i: np.where(i < 29, i + 1, 0)
    ),
}


def lengths(num_rows, position):
    return 17 * np.arange(1, num_rows + 1)[:, None] + 0 * position


@pytest.fixture
def emulated(monkeypatch):
    """Makes CPU programs take the CUDA path, whatever their dtype."""
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_fwd_p", Forward)
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_bwd_p", Backward)
    for module in (local, rotating):
        monkeypatch.setattr(module, "attend_blocks", cudnn.attend)
        monkeypatch.setattr(module, "gradients_of_blocks", cudnn.gradients)
    for name in ("_forward", "_backward"):  # cached traces would bypass the patch
        monkeypatch.setattr(local, name, getattr(local, name).__wrapped__)


@pytest.fixture
def only_dense(emulated, monkeypatch):
    """Makes every computation that does not go to cuDNN as a whole return NaN."""

    def poison(of):
        nan = lambda x: x + jnp.nan
        return lambda *operands: jax.tree.map(nan, of(*operands))

    for name in ("attend_in_tiles", "gradients_in_tiles", "gradients_blockwise"):
        monkeypatch.setattr(cudnn, name, poison(getattr(cudnn, name)))


def results(q, k, v, ranges, dout):
    start, end = ranges
    out, lse = local_attention(q, k, v, start, end, **BLOCKS)
    return out, lse, *local_attention_backward(q, k, v, start, end, out, lse, dout, **BLOCKS)


def assert_equals_oracle(actual, operands, ranges, tolerance=1e-5):
    q, k, v, dout = operands
    start, end = ranges
    out, lse = attention(q, k, v, start, end)
    dlse = np.zeros(lse.shape)
    gradients = attention_gradients(q, k, v, start, end, dout, dlse)
    for x, y in zip(actual, (out, lse, *gradients), strict=True):
        assert_close(x, y, tolerance)


@jax.jit
def dense_results(*operands):
    return results(*operands)


@pytest.mark.usefixtures("only_dense")
@pytest.mark.parametrize("ranges", DENSE)
def test_dense_ranges_go_to_cudnn(ranges):
    *operands, _ = inputs(0)
    ranges = DENSE[ranges](2, 37, 45)
    assert_equals_oracle(dense_results(*operands[:3], ranges, operands[3]), operands, ranges)


@pytest.mark.usefixtures("only_dense")
def test_more_queries_than_keys():
    *operands, _ = inputs(1, T=45, S=19)
    ranges = rows(2, 45, lambda i: 0 * i, lambda i: np.where(i < 19, i + 1, 0))
    assert_equals_oracle(dense_results(*operands[:3], ranges, operands[3]), operands, ranges)


@jax.jit
def any_results(*operands):  # a separate function, traced without poison, in small tiles
    return results(*operands)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "ranges", ["packed", "window", "random", "causal", "empty", "one document"]
)
def test_other_ranges_are_computed_in_tiles(ranges, monkeypatch):
    """Tiles of 16 rows: in some a document begins; others are causal, full or masked out."""
    monkeypatch.setattr(tiles, "TILE_ROWS", 16)
    *operands, _ = inputs(2, T=48, S=64)
    one_document = lambda *_: rows(2, 48, lambda i: 0 * i + 3, lambda i: i + 1)
    ranges = (RANGES | {"one document": one_document})[ranges](2, 48, 64)
    assert_equals_oracle(any_results(*operands[:3], ranges, operands[3]), operands, ranges)


@pytest.mark.usefixtures("only_dense")
def test_gradients_of_merged_parts():
    """They use the lse and output of the whole softmax, not those of the local keys."""
    q, k, v, dout, _ = inputs(3, T=32, S=40)
    parts = [(k[:, :24], v[:, :24]), (k[:, 24:], v[:, 24:])]
    ranges = [rows(2, 32, lambda i: 0 * i, lambda i, n=n: 0 * i + n) for n in (24, 16)]
    held: Any = [(*part, *its) for part, its in zip(parts, ranges, strict=True)]

    backward: Any = local_attention_backward

    @jax.jit
    def in_parts(q, held):
        first, second = (local_attention(q, *x, **BLOCKS) for x in held)
        out, lse = merge_partials(*first, *second)
        outcome = out, lse, dout
        grads = [backward(q, *x, *outcome, **BLOCKS) for x in held]
        dq, dk, dv = zip(*grads, strict=True)
        return out, lse, sum(dq), *(jnp.concatenate(dx, axis=1) for dx in (dk, dv))

    whole = rows(2, 32, lambda i: 0 * i, lambda i: 0 * i + 40)
    assert_equals_oracle(in_parts(q, held), (q, k, v, dout), whole)


@pytest.mark.usefixtures("emulated")
def test_cotangent_of_the_lse():
    q, k, v, dout, dlse = inputs(4)
    start, end = RANGES["causal"](2, 37, 45)

    @jax.jit
    def gradients(q, k, v):
        attend = lambda q, k, v: local_attention(q, k, v, start, end, **BLOCKS)
        _, vjp = jax.vjp(attend, q, k, v)
        return vjp((dout, dlse))

    expected = attention_gradients(q, k, v, start, end, dout, dlse)
    for actual, wanted in zip(gradients(q, k, v), expected, strict=True):
        assert_close(actual, wanted, 1e-5)


@pytest.mark.usefixtures("only_dense")
def test_every_step_of_dense_attention_goes_to_cudnn():
    """Zigzag halves of several chunks: two pieces of queries attend to different key lengths."""
    case = Case("hamilton", 3, 8, heads=(4, 2))
    check(case, draw(case))


# ---- Lowering, without this package's kernels.


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setenv("JAX_CP_DISPATCH_ATTENTION_KERNEL", "0")


SHAPES = {"B": 1, "T": 256, "S": 256, "N": 4, "K": 2, "H": 64, "Hv": 64}


def cudnn_calls(fn, *arguments, platform="cuda"):
    """Returns (target, mask) of each call, in program order."""
    text = jax.jit(fn).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    calls = (line for line in text.splitlines() if "custom_call @__cudnn$" in line)
    found = [re.search(r"@__cudnn\$(\w+)\(.*mask_type[^A-Z]+([A-Z]+)", call) for call in calls]
    return [match.groups() for match in found if match]


def lower_both(shapes, dtype=jnp.bfloat16, platform="cuda", use_lse=False, **options: Any):
    """Returns the calls of the forward pass, and those of both passes."""
    q, k, v, *_ = inputs(5, **(SHAPES | shapes), dtype=dtype)
    start, end = RANGES["causal"](1, 256, 256)
    attend = lambda q, k, v: local_attention(q, k, v, start, end, **options)
    loss = lambda *x: sum(jnp.sum(jnp.where(y > -9, y, 0)) for y in attend(*x)[: 1 + use_lse])
    return tuple(
        cudnn_calls(fn, q, k, v, platform=platform)
        for fn in (attend, jax.grad(loss, argnums=(0, 1, 2)))
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_programs_for_cuda_call_cudnn(dtype):
    masks = 2 * ("CAUSAL", "PADDING")  # in one call, and in tiles
    forward = [("fmhaSoftmax", mask) for mask in masks]
    backward = [("fmhaSoftmaxBackward", mask) for mask in masks]
    assert lower_both({}, dtype) == (forward, forward + backward)


def test_operands_of_the_cudnn_calls():
    q, k, v, *_ = inputs(5, **SHAPES, dtype=jnp.bfloat16)
    start, end = RANGES["causal"](1, 256, 256)
    fn = lambda q, k, v: local_attention(q, k, v, start, end, scale=0.375)
    text = jax.jit(fn).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    causal, padded, *_ = (line for line in text.splitlines() if "custom_call @__cudnn$" in line)
    # Each has one batch row and one KV head, with the query heads that share it.
    query, key = "tensor<2x2x256x64xbf16>", "tensor<2x1x256x64xbf16>"
    for call, lengths in ((causal, ""), (padded, ", tensor<2xi32>, tensor<2xi32>")):
        assert f": ({query}, {key}, {key}{lengths}) -> ({query}, tensor<2x2x256xf32>" in call
        assert r"fmha_scale\22: 0.375" in call


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": jnp.float32},
        {"logit_soft_cap": 30.0},
        {"shapes": {"H": 60, "Hv": 60}},
        {"shapes": {"H": 256, "Hv": 256}},
        {"shapes": {"Hv": 32}},
        {"platform": "cpu"},
    ],
    ids=str,
)
def test_unsupported_options_are_blockwise(case):
    assert lower_both(case.pop("shapes", {}), **case) == ([], [])


def test_a_cotangent_of_the_lse_is_blockwise():
    forward, both = lower_both({}, use_lse=True)
    assert forward == both != []
