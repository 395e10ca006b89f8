"""MaxText's own training loop with the adapters equals MaxText's attention on one context device.

Needs MaxText 0.2.5 and Python 3.12: `./run maxtext`. Both runs have 8 devices and begin with the
same parameters.
"""

import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from maxtext_runs import DEADLINE, STEPS, TOLERANCE, losses

import jax_cp_dispatch as cpd
from jax_cp_dispatch.adapters import maxtext, maxtext_attention

CONTEXT_4 = {"ici_context_parallelism": 4, "ici_fsdp_parallelism": 2}
IN_ORDER = {"context_parallel_load_balance": False}
# DeepSeek's latents as one KV head.
ABSORBED = {"use_mla_absorbed_mqa": True, "attention": "dot_product", "mla_naive_kvcache": False}

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
        **{"use_qk_clip": True, "qk_clip_threshold": 0.5},
    },
    "gpt_oss": {
        **{"decoder_block": "gpt_oss", "attention_sink": True, "attention_bias": True},
        **{"inhomogeneous_layer_cycle_interval": 2, "sliding_window_size": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32},
        **{"sparse_matmul": False, "megablox": False, "routed_bias": True, "mlp_bias": True},
        **{"mlp_activations": ["sigmoid", "linear"], "mlp_activations_limit": 7.0},
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
        ("deepseek", "zigzag", ABSORBED),
        ("gpt_oss", "zigzag", {}),
        ("pipeline", "ring", {"ici_fsdp_parallelism": 1}),
    ],
)
def test_training(model, algorithm, options):
    adapter = maxtext_attention(algorithm=algorithm, deadline=DEADLINE)
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
    adapter = maxtext_attention(algorithm="ring", deadline=DEADLINE)
    got = losses(STEPS, adapter, **narrow, **{**CONTEXT_4, "ici_fsdp_parallelism": 1})
    error = lambda found: np.abs(found - expected("llama")).max()
    print(f"bfloat16: {error(got):.1e}, MaxText's own: {error(dense):.1e}")
    assert error(got) < max(2 * error(dense), 0.01), (error(got), error(dense))
