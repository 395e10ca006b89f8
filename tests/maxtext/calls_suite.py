"""Single calls of MaxText's `AttentionOp` with the adapter, on a mesh with context 4 x tensor 2.

Every kind of attention equals MaxText's own; other calls are left to MaxText, with a reason.
"""

import re
import warnings
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxtext.common.common_types import AttentionType  # pyright: ignore[reportMissingImports]
from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
from maxtext.layers.attention_op import AttentionOp  # pyright: ignore[reportMissingImports]
from maxtext.utils import maxtext_utils  # pyright: ignore[reportMissingImports]
from maxtext_runs import OPTIONS, packed_batch, watched

from jax_cp_dispatch.adapters import maxtext_attention
from jax_cp_dispatch.documents import zigzag_permutation

B, T, N, K, H = 2, 64, 4, 2, 8
NUM_RANKS = 4
AXES = {"ici_context_parallelism": NUM_RANKS, "ici_tensor_parallelism": 2}
RNG = np.random.default_rng(1)


def operation(kind: str = "global", load_balance: bool = False, **options: Any) -> AttentionOp:
    options = {**OPTIONS, **AXES, "causal_block_size": 12, **options}
    options["context_parallel_load_balance"] = load_balance
    config = pyconfig.initialize(["", *(f"{name}={value}" for name, value in options.items())])
    return AttentionOp(
        config=config,
        mesh=jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes),
        attention_kernel="dot_product",
        max_target_length=T,
        num_query_heads=N,
        num_kv_heads=K,
        attention_type=AttentionType(kind),
        sliding_window_size=9,
        chunk_attn_window_size=24,
        attn_logits_soft_cap=2.0,
    )


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def arrays():
    """Returns q, k, v, the cotangent of the output, segment ids and positions."""
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K, N))
    batch = packed_batch(rng, B, T, 64)
    ids, positions = batch["inputs_segmentation"], batch["inputs_position"]
    return q, k, v, g * (ids > 0)[..., None, None], ids, positions  # padding differs


def tokens():
    """Returns q, k, v, segment ids and positions."""
    q, k, v, _, ids, positions = arrays()
    return q, k, v, ids, positions


def jitted(op, fn, *operands):
    """Returns `fn(op, *operands)` under MaxText's mesh and rules."""
    with jax.set_mesh(op.mesh), flax.linen.logical_axis_rules(op.config.logical_axis_rules):
        return nnx.jit(fn)(op, *operands)


def attend(op, q, k, v, ids, positions, **more):
    return jitted(op, lambda op, *x: op(*x, "train", **more), q, k, v, ids, positions)


# ---- Every kind of attention.


def results(op, inputs, **asked):
    """Returns the output, gradients, and the largest logits if asked for."""

    def both(op, q, k, v, g, ids, positions, sinks, is_image):
        def attend(q, k, v, sinks, **more):
            of_tokens = {"bidirectional_mask": is_image, "sinks": sinks}
            return op(q, k, v, ids, positions, "train", **of_tokens, **more)

        out, pull = jax.vjp(attend, q, k, v, sinks)
        attend(q, k, v, sinks, **asked)
        largest = [x.max(0) for x in jax.tree.leaves(nnx.pop(op, nnx.Intermediate))]
        *gradients, of_sinks = pull(g)
        of_sinks = [] if of_sinks is None else [of_sinks]
        return [out * (ids > 0)[..., None, None], *gradients], of_sinks + largest

    return jitted(op, both, *inputs)


def check(kind: str, load_balance: bool, expected, inputs, order, **asked) -> None:
    """Compares with MaxText's results; the axes are those of its rules."""
    stored = [x[:, order] if np.ndim(x) > 1 else x for x in inputs]
    with watched() as ours, maxtext_attention():
        of_tokens, of_heads = results(operation(kind, load_balance), stored, **asked)
    assert ours.call_args.kwargs["axis_name"] == ("context",)
    assert ours.call_args.kwargs["head_axis"] == ("tensor",)
    in_order = [x[:, np.argsort(order)] for x in of_tokens]
    for got, want in zip([*in_order, *of_heads], [*expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


KINDS = ("global", "local_sliding", "chunk", "block_diffusion", "full")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_order = pytest.mark.parametrize("load_balance", [False, True])


@each_order
@each_kind
def test_kinds_of_attention(kind, load_balance):
    """Forward and backward equal MaxText's. With load balance it counts chunks in documents."""
    inputs = [*arrays(), None, None]
    order = zigzag_permutation(T, NUM_RANKS) if load_balance else np.arange(T)
    stored = [x if x is None else x[:, order] for x in inputs]
    of_tokens, _ = results(operation(kind, load_balance), stored)
    check(kind, load_balance, ([x[:, np.argsort(order)] for x in of_tokens], []), inputs, order)


@each_order
@each_kind
def test_sinks_images_and_largest_logits(kind, load_balance):
    """As MaxText's of tokens in order; its own load balance splits images."""
    q, k, v, g, ids, positions = arrays()
    is_image = (ids > 0) & (positions >= 2) & (positions < 14)
    ids = ids + 1  # MaxText's largest logits are also of padding
    if load_balance:  # one document, in which chunks count as in the row
        ids, positions = np.ones_like(ids), np.tile(np.arange(T, dtype=np.int32), (len(ids), 1))
    sinks = np.random.default_rng(1).normal(1, 1, N).astype(np.float32)
    inputs, asked = [q, k, v, g, ids, positions, sinks, is_image], {"record_max_logits": True}
    order = zigzag_permutation(T, NUM_RANKS) if load_balance else np.arange(T)
    check(kind, load_balance, results(operation(kind), inputs, **asked), inputs, order, **asked)


def test_balanced_needs_tokens_in_order():
    message = "'balanced' needs tokens in packed order"
    with maxtext_attention(algorithm="balanced"), pytest.raises(ValueError, match=message):
        attend(operation(load_balance=True), *tokens())


def test_the_method_is_restored():
    before = AttentionOp.apply_attention
    with pytest.raises(KeyError), maxtext_attention():
        assert AttentionOp.apply_attention is not before
        raise KeyError
    assert AttentionOp.apply_attention is before


# ---- Calls that are left to MaxText: the result is that without the adapter.

IN_ORDER = slice(None)
MORE = 16  # keys that do not belong to a query
# A stripe of each device is every fourth token.
STRIPED = np.arange(T).reshape(-1, 4).T.ravel()
ON_GPUS = {"hardware": "gpu", "context_parallel_strategy": "ring", "load_balance": True}
MORE_IDS = RNG.integers(-1, 3, (B, MORE), np.int32)
COMPRESSED = {
    "compressed_kv": normal(B, MORE, K, H),
    "compressed_mask": np.where(RNG.random((B, 1, 1, T, MORE)) < 0.5, 0, -1e9).astype(np.float32),
    "decoder_segment_ids_kv": np.concatenate([arrays()[4], MORE_IDS], axis=1),
}


# The reason; options, further arguments, keys ahead of those of the queries, and order of tokens.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, Any]] = {
    "indexer_mask": ({}, {"indexer_mask": normal(B, T, T)}, 0, IN_ORDER),
    "moba": ({"moba": True, "moba_chunk_size": 16, "moba_topk": 2}, {}, 0, IN_ORDER),
    "compressed_mask and decoder_segment_ids_kv and keys of another length": (
        {}, COMPRESSED, 0, IN_ORDER
    ),
    "decoder_segment_ids_kv": ({}, {"decoder_segment_ids_kv": arrays()[4][::-1]}, 0, IN_ORDER),
    "keys of another length": ({}, {}, MORE, IN_ORDER),
    "previous_chunk and keys of another length": (
        {}, {"previous_chunk": np.zeros((B, MORE))}, MORE, IN_ORDER
    ),
    "tokens in stripes": (
        {**ON_GPUS, "context_parallel_reorder_strategy": "striped"}, {}, 0, STRIPED
    ),
    "tokens in stripes ": (ON_GPUS, {}, 0, STRIPED),  # "auto" means stripes here
}  # fmt: skip


@pytest.mark.parametrize("reason, case", CASES.items(), ids=CASES)
def test_what_is_left_to_maxtext(reason, case):
    """A warning names the reason, if the sequence is sharded."""
    options, arguments, num_more, order = case
    q, k, v, ids, positions = (x[:, order] for x in tokens())
    if num_more:
        k, v = (np.concatenate([normal(B, num_more, K, H), x], axis=1) for x in (k, v))
        ids = np.pad(ids, ((0, 0), (num_more, 0)), constant_values=1)
        # Without a chunk before, MaxText has no segment ids for keys without a query.
        ids = ids if "previous_chunk" in arguments else None
    op, inputs = operation(**options), (q, k, v, ids, positions)
    expected = attend(op, *inputs, **arguments)
    message = f"^maxtext_attention: got {re.escape(reason.strip())}; MaxText computes it"
    with maxtext_attention(), pytest.warns(UserWarning, match=message):
        got = attend(op, *inputs, **arguments)
    np.testing.assert_array_equal(got, expected)


def test_compressed_attention_is_rejected_by_maxtext():
    """Under context parallelism, with the adapter as without."""
    with (
        maxtext_attention(),
        pytest.warns(UserWarning, match="got compressed attention; MaxText computes it"),
        pytest.raises(ValueError, match=r"not supported with AttentionType\.COMPRESSED"),
    ):
        attend(operation("compressed"), *tokens())


def test_without_context_devices_nothing_changes():
    op = operation(ici_context_parallelism=1, ici_fsdp_parallelism=4)
    inputs = [np.concatenate([x, x]) for x in tokens()]
    expected = attend(op, *inputs)
    with maxtext_attention(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = attend(op, *inputs)
    np.testing.assert_array_equal(got, expected)


CHUNK, BEFORE = slice(T - MORE, T), jnp.zeros((B, T - MORE))
INFERENCE = {
    "prefill": (IN_ORDER, {"model_mode": "prefill"}),
    "prefill in chunks": (CHUNK, {"model_mode": "prefill", "previous_chunk": BEFORE}),
    "decoding": (slice(T - 1, T), {"model_mode": "autoregressive"}),
}


@pytest.mark.parametrize("rows, mode", INFERENCE.values(), ids=INFERENCE)
def test_inference_stays_with_maxtext(rows, mode):
    """Keys are those of a cache: with chunks those before, too; one query in decoding."""
    q, k, v, ids, positions = tokens()
    einsums = {f"{name}_product_einsum": jnp.einsum for name in ("qk", "wv")}
    compute = lambda op, *x: op.apply_attention(*x, None, **mode, **einsums)
    op, inputs = operation(), (q[:, rows], k, v, ids, positions[:, rows])
    expected = jitted(op, compute, *inputs)
    with watched() as ours, maxtext_attention():
        got = jitted(op, compute, *inputs)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert not ours.called
