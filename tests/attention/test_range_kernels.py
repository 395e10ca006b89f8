"""Local attention by this package's CUDA kernels, without a GPU: their operands and their place.

`native/test_attention_kernels.cc` runs the kernels themselves on the host. Here plain JAX takes
their place, on the contiguous rows that they get.
"""

import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, attention_gradients
from cudnn_emulation import Backward, Forward
from local_cases import RANGES, assert_close, inputs

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.attention.local import api as local, cudnn, range_kernels
from jax_cp_dispatch.attention.local.api import local_attention

BLOCKS: Any = {"block_q": 8, "block_kv": 16}


def emulation(target, shapes, options, operands):
    """The kernels' results, in plain JAX over the rows of each matrix."""
    of_matrix = [x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]) for x in operands]
    q, k, v, start, end, *others = of_matrix
    key = jnp.arange(k.shape[1])
    sees = (key >= start[..., None]) & (key < end[..., None])
    logits = jnp.where(sees, options.scale * jnp.einsum("mth,msh->mts", q, k), -jnp.inf)
    if target == range_kernels.ATTEND_TARGET:
        nothing = jnp.zeros(q.shape[:2])
        peak, total, acc = others or [nothing - 1e30, nothing, jnp.zeros(q.shape)]
        new_peak = jnp.maximum(peak, logits.max(2))
        p, keep = jnp.exp(logits - new_peak[..., None]), jnp.exp(peak - new_peak)
        results = [new_peak, total * keep + p.sum(2), acc * keep[..., None] + p @ v]
    else:
        dout, lse, delta = others
        p = jnp.exp(logits - lse[..., None])
        ds = options.scale * p * (dout @ jnp.swapaxes(v, 1, 2) - delta[..., None])
        transposed = lambda x: jnp.swapaxes(x, 1, 2)
        reach = jnp.zeros((q.shape[0], -(-q.shape[1] // 64), 2), jnp.int32)
        results = [ds @ k, transposed(ds) @ q, transposed(p) @ dout, reach]
    return [x.reshape(shape.shape) for x, shape in zip(results, shapes, strict=True)]


@pytest.fixture
def only_kernels(monkeypatch):
    """Makes CPU programs take the CUDA path; what is not dense must go to the kernels."""
    poison = lambda *_: pytest.fail("not by the kernels")
    for name in ("attend_in_tiles", "gradients_in_tiles", "gradients_blockwise"):
        monkeypatch.setattr(cudnn, name, poison)
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_fwd_p", Forward)
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_bwd_p", Backward)
    monkeypatch.setattr(range_kernels, "takes", lambda q: True)
    monkeypatch.setattr(range_kernels, "_call", emulation)
    monkeypatch.setattr(local, "attend_blocks", cudnn.attend)
    monkeypatch.setattr(local, "gradients_of_blocks", cudnn.gradients)
    for name in ("_forward", "_backward"):  # cached traces would bypass the patch
        monkeypatch.setattr(local, name, getattr(local, name).__wrapped__)


@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize("with_dlse", [False, True])
def test_packed_documents_go_to_the_kernels(with_dlse):
    q, k, v, dout, dlse = inputs(int(np.random.default_rng().integers(1 << 30)))
    dlse = dlse * with_dlse
    start, end = RANGES["packed"](2, 37, 45)

    @jax.jit
    def results(q, k, v):
        attend = lambda q, k, v: local_attention(q, k, v, start, end, **BLOCKS)
        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return out, lse, *vjp((dout, dlse) if with_dlse else (dout, jnp.zeros_like(dlse)))

    wanted = attention(q, k, v, start, end)
    wanted += tuple(attention_gradients(q, k, v, start, end, dout, dlse))
    for actual, expected in zip(results(q, k, v), wanted, strict=True):
        assert_close(actual, expected, 1e-5)


# ---- Lowering.


@pytest.fixture
def extension(monkeypatch):
    """Pretends that the extension exists, built or not."""
    names = {range_kernels.ATTEND_TARGET: {}, range_kernels.GRADIENTS_TARGET: {}}
    monkeypatch.setattr(runtime, "cuda", types.SimpleNamespace(registrations=lambda: names))


def calls(q, k, v, **options):
    """Returns the operand and result types of the kernels' calls in a program with gradients."""
    start, end = RANGES["packed"](1, q.shape[1], k.shape[1])
    attend = lambda q, k, v: local_attention(q, k, v, start, end, **options)[0]
    loss = lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum()
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, v)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.while" in text) == ("jax_cp_dispatch.att" not in text)
    found = re.findall(r"@jax_cp_dispatch\.(att\w+)\(.*(scale = \S+ : f32).* : (\(.*)", text)
    return [tuple(call) for call in found]


@pytest.mark.usefixtures("extension")
def test_operands_of_the_calls():
    q, k, v, *_ = inputs(0, B=1, T=200, S=128, N=4, K=2, H=64, Hv=64, dtype=jnp.bfloat16)
    forward, backward = calls(q, k, v, scale=0.375)
    rows, keys = "2x1x400x", "2x1x128x"
    operands = [f"tensor<{size}64xbf16>" for size in (rows, keys, keys)]
    operands += [f"tensor<{rows}i32>"] * 2
    row, wide = f"tensor<{rows}f32>", f"tensor<{rows}64xf32>"
    results = [row, row, wide]
    types_of = lambda operands, results: f"({', '.join(operands)}) -> ({', '.join(results)})"
    assert forward == ("attend", "scale = 3.750000e-01 : f32", types_of(operands, results))
    operands += [f"tensor<{rows}64xbf16>", row, row]
    of_keys = f"tensor<{keys}64xf32>"
    results = [wide, of_keys, of_keys, "tensor<2x7x2xi32>"]
    assert backward[0] == "attention_gradients"
    assert backward[2] == types_of(operands, results)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    "case", [{"dtype": jnp.float16}, {"H": 32, "Hv": 32}, {"logit_soft_cap": 9.0}, {"off": "0"}]
)
def test_others_are_not_by_the_kernels(case, monkeypatch):
    monkeypatch.setenv("JAX_CP_DISPATCH_ATTENTION_KERNEL", case.pop("off", "1"))
    options = {name: case.pop(name) for name in ("logit_soft_cap",) if name in case}
    shapes: Any = {"B": 1, "T": 64, "S": 64, "H": 64, "Hv": 64, "dtype": jnp.bfloat16}
    assert calls(*inputs(0, **(shapes | case))[:3], **options) == []
