"""Single calls of MaxText's `AttentionOp`: every kind of attention, and what is left to MaxText."""

import warnings
from typing import Any
from unittest import mock

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxtext.common.common_types import AttentionType  # pyright: ignore[reportMissingImports]
from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
from maxtext.layers.attention_op import AttentionOp  # pyright: ignore[reportMissingImports]
from maxtext.utils import maxtext_utils  # pyright: ignore[reportMissingImports]
from maxtext_runs import OPTIONS, packed_batch

import jax_cp_dispatch as cpd
from jax_cp_dispatch.adapters import maxtext, maxtext_attention

B, T, N, K, H = 2, 64, 4, 2, 8
NUM_RANKS = 4
AXES = {"ici_context_parallelism": NUM_RANKS, "ici_tensor_parallelism": 2}


def operation(kind: str = "global", load_balance: bool = False, **options: Any) -> AttentionOp:
    options = {**OPTIONS, **AXES, **options, "context_parallel_load_balance": load_balance}
    config = pyconfig.initialize(["", *(f"{name}={value}" for name, value in options.items())])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    return AttentionOp(
        config=config,
        mesh=mesh,
        attention_kernel="dot_product",
        max_target_length=T,
        num_query_heads=N,
        num_kv_heads=K,
        attention_type=AttentionType(kind),
        sliding_window_size=9,
        chunk_attn_window_size=24,
        attn_logits_soft_cap=2.0,
    )


def arrays():
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K, N))
    batch = packed_batch(rng, B, T, 64)
    ids, positions = batch["inputs_segmentation"], batch["inputs_position"]
    return q, k, v, g * (ids > 0)[..., None, None], ids, positions  # padding differs


def jitted(op, fn, *operands):
    with jax.set_mesh(op.mesh), flax.linen.logical_axis_rules(op.config.logical_axis_rules):
        return flax.nnx.jit(fn)(op, *operands)


def attend(op, q, k, v, ids, positions, **more):
    return jitted(op, lambda op, *x: op(*x, "train", **more), q, k, v, ids, positions)


def with_gradients(op, q, k, v, g, ids, positions):
    def both(op, q, k, v):
        out, pull = jax.vjp(lambda *qkv: op(*qkv, ids, positions, "train"), q, k, v)
        return out * (ids > 0)[..., None, None], *pull(g)

    return jitted(op, both, q, k, v)


@pytest.mark.parametrize("load_balance", [False, True])
@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk", "full"])
def test_kinds_of_attention(kind, load_balance):
    """Forward and backward equal MaxText's, of tokens in order; the axes are those of its rules."""
    inputs = arrays()
    expected = with_gradients(operation(kind), *inputs)
    order = cpd.zigzag_permutation(T, NUM_RANKS) if load_balance else np.arange(T)
    op = operation(kind, load_balance)
    ours = mock.Mock(wraps=cpd.context_parallel_attention)
    with mock.patch.object(maxtext, "context_parallel_attention", ours), maxtext_attention():
        got = with_gradients(op, *(x[:, order] for x in inputs))
    assert ours.call_args.kwargs["axis_name"] == ("context",)
    assert ours.call_args.kwargs["head_axis"] == ("tensor",)
    for one, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, want[:, order], rtol=0, atol=1e-5)


def test_balanced_needs_tokens_in_order():
    q, k, v, _, ids, positions = arrays()
    with (
        maxtext_attention(algorithm="balanced"),
        pytest.raises(ValueError, match="'balanced' plans causal attention of tokens in order"),
    ):
        attend(operation(load_balance=True), q, k, v, ids, positions)


LEFT_TO_MAXTEXT: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": jnp.ones(N)},
    "bidirectional_mask": {"bidirectional_mask": jnp.zeros((B, T), bool).at[:, 3:9].set(True)},
    "indexer_mask": {"indexer_mask": jnp.zeros((B, T, T))},
    "record_max_logits": {"record_max_logits": True},
}


@pytest.mark.parametrize("name", [*LEFT_TO_MAXTEXT, "moba", "block_diffusion attention"])
def test_what_is_left_to_maxtext(name):
    """The same result as without the adapter, and a warning with the reason."""
    q, k, v, _, ids, positions = arrays()
    more = LEFT_TO_MAXTEXT.get(name, {})
    options = {"moba": True, "moba_chunk_size": 16, "moba_topk": 2} if name == "moba" else {}
    kind = "block_diffusion" if "diffusion" in name else "global"
    options |= {"causal_block_size": 8} if "diffusion" in name else {}
    op = operation(kind, **options)
    expected = attend(op, q, k, v, ids, positions, **more)
    with maxtext_attention(), pytest.warns(UserWarning, match=f"got {name}; MaxText computes it"):
        got = attend(op, q, k, v, ids, positions, **more)
    np.testing.assert_array_equal(got, expected)


def test_without_context_devices_nothing_changes():
    q, k, v, _, ids, positions = arrays()
    op = operation(ici_context_parallelism=1, ici_fsdp_parallelism=4)
    q, k, v, ids, positions = (np.concatenate([x, x]) for x in (q, k, v, ids, positions))
    expected = attend(op, q, k, v, ids, positions)
    with maxtext_attention(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = attend(op, q, k, v, ids, positions)
    np.testing.assert_array_equal(got, expected)


def test_prefill_stays_with_maxtext():
    q, k, v, _, ids, positions = arrays()
    einsums = {f"{name}_product_einsum": jnp.einsum for name in ("qk", "wv")}
    prefill = lambda op, *x: op.apply_attention(*x, None, "prefill", **einsums)
    op = operation()
    expected = jitted(op, prefill, q, k, v, ids, positions)
    ours = mock.Mock(wraps=cpd.context_parallel_attention)
    with mock.patch.object(maxtext, "context_parallel_attention", ours), maxtext_attention():
        got = jitted(op, prefill, q, k, v, ids, positions)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert not ours.called


def test_the_method_is_restored():
    before = AttentionOp.apply_attention
    with pytest.raises(KeyError), maxtext_attention():
        assert AttentionOp.apply_attention is not before
        raise KeyError
    assert AttentionOp.apply_attention is before
