"""MaxText's own training loop with the adapters equals MaxText's own attention, GEMMs and experts.

Needs MaxText 0.2.5 and Python 3.12: `./run maxtext`. All runs have 8 devices, and those that are
compared begin with the same parameters.
"""

import functools
import pathlib
import re
import subprocess
import sys
import warnings
from typing import Any
from unittest import mock

import jax
import maxtext_runs
import numpy as np
import pytest
from maxtext_runs import DEADLINE, STEPS, TOLERANCE, losses, warn_again, watched, without_overlap

import jax_cp_dispatch as cpd
from jax_cp_dispatch.adapters import maxtext_attention, maxtext_gemms

# ---- Attention.

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


def check(name: str, got: np.ndarray, want: np.ndarray) -> None:
    print(f"{name}: {np.abs(got - want).max():.1e}")
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    assert got[-1] < 0.9 * got[0]


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
def test_attention(model, algorithm, options):
    adapter = maxtext_attention(algorithm=algorithm, deadline=DEADLINE)
    with watched() as attend:
        got = losses(STEPS, adapter, **{**MODELS[model], **CONTEXT_4, **options})
    assert attend.called
    check(f"{model}, {algorithm}", got, expected(model))


INDEXED: dict[str, Any] = {
    **{**MODELS["deepseek"], "use_qk_clip": False, "q_lora_rank": 16, "use_indexer": True},
    **{"indexer_n_heads": 4, "indexer_head_dim": 16, "indexer_topk": 12},
    "indexer_loss_scaling_factor": 0.1,
}


PACKED_BATCH = maxtext_runs.packed_batch


def batch_without_padding(*sizes: Any) -> dict[str, np.ndarray]:
    """MaxText's loss of an index also has padding, which is a document of its own here."""
    batch = PACKED_BATCH(*sizes)
    for ids, positions in zip(batch["inputs_segmentation"], batch["inputs_position"], strict=True):
        is_padding = ids == 0
        positions[is_padding], ids[is_padding] = np.arange(is_padding.sum()), ids.max() + 1
    return batch


@pytest.mark.parametrize(
    "algorithm, is_sparse, options",
    [("halo", True, {}), ("balanced", True, IN_ORDER), ("halo", False, IN_ORDER)],
)
def test_indexers(algorithm, is_sparse, options):
    """Of DeepSeek-V3.2; in the warm-up the loss is that of the index alone. Without a warning.

    Scores that differ in their last bits would seldom pick another key.
    """
    model, steps = {**INDEXED, "indexer_sparse_training": is_sparse}, 5
    adapter = maxtext_attention(algorithm=algorithm, deadline=DEADLINE)
    iterator = mock.patch.object(maxtext_runs, "packed_batch", batch_without_padding)
    with iterator, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = losses(steps, adapter, **model, **CONTEXT_4, **options)
        want = losses(steps, **model, ici_fsdp_parallelism=8)
    assert not [str(w.message) for w in said if "maxtext_attention" in str(w.message)]
    print(f"indexers, {algorithm}: {np.abs(got - want).max():.1e}")
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    assert got[-1] < got[0]


def test_bfloat16_and_tensor_parallelism():
    """At most twice as far from float32 losses as MaxText's own attention, or within 0.01."""
    narrow = {"dtype": "bfloat16", "ici_tensor_parallelism": 2}
    dense = losses(STEPS, **narrow, ici_fsdp_parallelism=4)
    adapter = maxtext_attention(algorithm="ring", deadline=DEADLINE)
    got = losses(STEPS, adapter, **narrow, **{**CONTEXT_4, "ici_fsdp_parallelism": 1})
    error = lambda found: np.abs(found - expected("llama")).max()
    print(f"bfloat16: {error(got):.1e}, MaxText's own: {error(dense):.1e}")
    assert error(got) < max(2 * error(dense), 0.01), (error(got), error(dense))


# ---- Overlapped GEMMs on context 2 x tensor_sequence 2 x fsdp 2, with the adapter's attention.

FUNCTIONS = ("all_gather_matmul", "matmul_reduce_scatter")
ORDER = ["context", "tensor_sequence"]
RULES = [[name, ORDER] for name in ("activation_norm_length", "activation_input_length_attn")]
GEMMS: dict[str, Any] = {
    **{"ici_context_parallelism": 2, "ici_tensor_sequence_parallelism": 2},
    **{"ici_fsdp_parallelism": 2, "context_parallel_load_balance": False},
}
D, N, K, H, F = 32, 4, 2, 8, 64  # of the model
SCATTERED = {(N, H, D), (F, D)}
# Fused, heads of q, k and v are one kernel, and both kernels of the MLP a tuple.
GATHERED = {False: {(D, N, H), (D, K, H), (D, F)}, True: {(D, N + 2 * K, H), ((D, F), (D, F))}}


def overlapped(steps: int, **options: Any) -> np.ndarray:
    """Returns the losses of a run with both adapters, which says every warning again."""
    warn_again()
    attention = maxtext_attention(algorithm="ring", deadline=DEADLINE)
    with maxtext_gemms(method="ring", deadline=DEADLINE):
        return losses(steps, attention, **GEMMS, **options)


def kernels_of(function: mock.Mock) -> set[Any]:
    """Returns the shapes of all kernels, and tuples of those that share one x."""
    kernels = [call.args[1] for call in function.call_args_list]
    return {tuple(w.shape for w in k) if isinstance(k, tuple) else k.shape for k in kernels}


@pytest.mark.parametrize("is_fused", [False, True])
def test_overlapped_gemms(is_fused):
    """The losses are those without overlap, and no tokens are gathered over context."""
    options = {"fused_qkv": is_fused, "fused_mlp": is_fused, "logical_axis_rules": RULES}
    # The same quantization without overlap, since it changes MaxText's first parameters, and on the
    # same mesh, since the order of heads in fused_qkv depends on it.
    plain = lambda x, kernel, dims, split, **_: jax.lax.dot_general(x, kernel, dims)
    with without_overlap(plain):
        want = losses(STEPS, maxtext_gemms(), **GEMMS, **options)
    with watched(*FUNCTIONS) as functions, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = overlapped(STEPS, **options)
    assert kernels_of(functions["all_gather_matmul"]) == GATHERED[is_fused]
    assert kernels_of(functions["matmul_reduce_scatter"]) == SCATTERED
    assert not [str(w.message) for w in said if "XLA gathers them" in str(w.message)]
    print(f"GEMMs, {is_fused}: {np.abs(got - want).max():.1e}")
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
def test_each_rule_is_needed(rule):
    """Without it, XLA gathers tokens over context, and a warning says so."""
    message = r"tokens are split over \('context',\) besides .* XLA gathers them over"
    rules = [other for other in RULES if other is not rule]
    with pytest.warns(UserWarning, match=message):
        overlapped(1, logical_axis_rules=rules)


@pytest.mark.parametrize(
    "name, value, options",
    [
        ("quantization", "int8", {}),
        ("num_experts", 4, {"decoder_block": "mixtral", "base_moe_mlp_dim": 64}),
    ],
)
def test_what_gemms_refuse(name, value, options):
    reason = re.escape(f"maxtext_gemms: got {name}={value!r}; omit one of them")
    with pytest.raises(NotImplementedError, match=reason):
        losses(1, maxtext_gemms(), **{**options, name: value})


# ---- Experts on four ranks, by replacing the one operation that XLA lacks on CPU.

MIXTRAL: dict[str, Any] = {
    **{"decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2},
    **{"base_moe_mlp_dim": 64, "sparse_matmul": True, "megablox": False},
}


def test_experts():
    """Gradients included."""
    moved = mock.Mock(wraps=cpd.ragged_all_to_all)
    with mock.patch.object(jax.lax, "ragged_all_to_all", moved):
        got = losses(STEPS, **MIXTRAL, ici_expert_parallelism=4, ici_fsdp_parallelism=2)
    assert moved.called
    check("experts", got, losses(STEPS, **MIXTRAL, ici_fsdp_parallelism=8))


# ---- A reader of docs/maxtext.md gets a running step from each program of the page.

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "maxtext.md"


@pytest.mark.parametrize("name", ["train_maxtext.py", "train_overlapped.py"])
def test_program_of_the_page(name, tmp_path):
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), flags=re.S)
    launchers = [text for kind, text in blocks if kind == "python"]
    commands = [text for kind, text in blocks if kind == "bash" and "train_" in text]
    index = next(i for i, text in enumerate(commands) if name in text)
    (tmp_path / name).write_text(launchers[index])
    command = commands[index].replace("maxtext-venv/bin/python", sys.executable)
    command = command.replace("/tmp/maxtext", str(tmp_path / "out"))
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"completed step: 4.*loss: \d", said), said
    assert "UserWarning: jax_cp_dispatch" not in said, said
