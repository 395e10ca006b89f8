"""MaxText's own training loop with the adapters equals MaxText's attention on one context device.

Needs MaxText 0.2.5 and Python 3.12: `./run maxtext`. Both runs have 8 devices and begin with the
same parameters.
"""

import functools
import pathlib
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from maxtext_runs import losses

import jax_cp_dispatch as cpd
from jax_cp_dispatch.adapters import (
    maxtext,
    maxtext_attention,
    maxtext_dense,
    maxtext_gemms,
    maxtext_product,
)

STEPS = 50
TOLERANCE = 1e-5  # of float32 losses of about 4, after 50 steps
CONTEXT_4 = {"ici_context_parallelism": 4, "ici_fsdp_parallelism": 2}
IN_ORDER = {"context_parallel_load_balance": False}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {
        **{"decoder_block": "gemma2", "base_num_decoder_layers": 2, "sliding_window_size": 16},
        **{"attn_logits_soft_cap": 50.0, "mlp_activations": ["gelu", "linear"]},
        **{"use_post_attn_norm": True, "use_post_ffw_norm": True},
    },
    "deepseek": {
        **{"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4},
        **{"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2, "shared_experts": 1, "sparse_matmul": False},
        **{"base_moe_mlp_dim": 32, "first_num_dense_layers": 1, "base_num_decoder_layers": 2},
        "megablox": False,
    },
    "pipeline": {
        **{"ici_pipeline_parallelism": 2, "num_layers_per_pipeline_stage": 1},
        **{"per_device_batch_size": 2, "num_pipeline_microbatches": 4},
    },
}


@functools.cache
def expected(name: str) -> np.ndarray:
    fsdp = 4 if name == "pipeline" else 8
    return losses(STEPS, **MODELS[name], ici_fsdp_parallelism=fsdp)


@pytest.mark.parametrize(
    "model, algorithm, options",
    [
        ("llama", "zigzag", {"remat_policy": "full"}),
        ("llama", "ring", {"remat_policy": "minimal_with_context", **IN_ORDER}),
        ("llama", "balanced", {"remat_policy": "save_out_proj", **IN_ORDER}),
        ("llama", "hamilton", {"remat_policy": "minimal"}),
        ("gemma", "zigzag", {}),
        ("deepseek", "hamilton", IN_ORDER),
        ("pipeline", "ring", {"ici_fsdp_parallelism": 1}),
    ],
)
def test_training(model, algorithm, options):
    adapter = maxtext_attention(algorithm=algorithm)
    attend = mock.Mock(wraps=cpd.context_parallel_attention)
    with mock.patch.object(maxtext, "context_parallel_attention", attend):
        got = losses(STEPS, adapter, **{**MODELS[model], **CONTEXT_4, **options})
    assert attend.called
    print(f"{model}, {algorithm}: {np.abs(got - expected(model)).max():.1e}")
    np.testing.assert_allclose(got, expected(model), rtol=0, atol=TOLERANCE)
    assert got[-1] < 0.9 * got[0]


def test_bfloat16_and_tensor_parallelism():
    """At most twice as far from float32 losses as MaxText's own attention, or within 0.01."""
    narrow = {"dtype": "bfloat16", "ici_tensor_parallelism": 2}
    dense = losses(STEPS, **narrow, ici_fsdp_parallelism=4)
    adapter = maxtext_attention(algorithm="ring")
    got = losses(STEPS, adapter, **narrow, **{**CONTEXT_4, "ici_fsdp_parallelism": 1})
    error = lambda found: np.abs(found - expected("llama")).max()
    print(f"bfloat16: {error(got):.1e}, MaxText's own: {error(dense):.1e}")
    assert error(got) < max(2 * error(dense), 0.01), (error(got), error(dense))


GEMMS = ("all_gather_matmul", "matmul_reduce_scatter")
ORDER = [["activation_norm_length", ["context", "tensor_sequence"]]]


@pytest.mark.parametrize("fused", [False, True])
def test_gemms(fused):
    """With attention: context 2 x tensor_sequence 2 x fsdp 2."""
    fused = {"fused_qkv": fused, "fused_mlp": fused}
    axes = {"ici_context_parallelism": 2, "ici_tensor_sequence_parallelism": 2}
    options = {**axes, **fused, **IN_ORDER, "logical_axis_rules": ORDER, "ici_fsdp_parallelism": 2}
    # The same quantization without overlap, since it changes MaxText's first parameters, and on the
    # same mesh, since the order of heads in fused_qkv depends on it.
    plain = lambda x, kernel, dims, split, **_: jax.lax.dot_general(x, kernel, dims)
    with mock.patch.object(maxtext_dense, "multiply", plain):
        want = losses(STEPS, maxtext_gemms(), **options)
    functions = {name: mock.Mock(wraps=getattr(cpd, name)) for name in GEMMS}
    with mock.patch.multiple(maxtext_product, **functions), maxtext_gemms(method="ring"):
        got = losses(STEPS, maxtext_attention(algorithm="ring"), **options)
    assert all(function.called for function in functions.values())
    print(f"GEMMs, {fused}: {np.abs(got - want).max():.1e}")
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name, value, options",
    [("quantization", "int8", {}), ("num_experts", 4, MODELS["deepseek"])],
)
def test_what_gemms_refuse(name, value, options):
    reason = re.escape(f"maxtext_gemms: got {name}={value!r}; omit one of them")
    with pytest.raises(NotImplementedError, match=reason):
        losses(1, maxtext_gemms(), **{**options, name: value})


def test_page(tmp_path):
    """A reader of docs/maxtext.md gets a running step."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "maxtext.md").read_text()
    launcher, _ = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    _, command = re.findall(r"```bash\n(.*?)```", page, flags=re.S)
    (tmp_path / "train_maxtext.py").write_text(launcher)
    command = command.replace("maxtext-venv/bin/python", sys.executable)
    command = command.replace("/tmp/maxtext", str(tmp_path / "out"))
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"completed step: 4.*loss: \d", done.stdout + done.stderr), done.stderr
