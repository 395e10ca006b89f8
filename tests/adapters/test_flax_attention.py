"""Layers of NNX and Linen with `flax_attention_fn` equal the same layers with a dense mask."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from layers import FEATURES, HEADS, MISSING, SHARDED, B, T, assert_same, batch

from jax_cp_dispatch import Documents, place_tokens
from jax_cp_dispatch.adapters import flax_attention_fn
from jax_cp_dispatch.masks import SlidingWindow


def library(name) -> Any:
    """Imports it in the process that needs it: that takes longer than most tests."""
    return pytest.importorskip(f"flax.{name}", reason=MISSING)


KEY = jax.random.key(0)
FLAX = flax_attention_fn(algorithm="zigzag", **SHARDED)


def nnx_layer(**options):
    sizes = {"num_heads": HEADS, "num_kv_heads": 2, "in_features": FEATURES}
    layer = library("nnx").MultiHeadAttention(
        **sizes, decode=False, rngs=library("nnx").Rngs(0), **options
    )
    return library("nnx").split(layer, library("nnx").Param, ...)


def linen_layer(**options):
    return library("linen").MultiHeadDotProductAttention(num_heads=HEADS, **options)


def test_flax_attention_fn_in_nnx():
    x, g, segment_ids, mask = batch(0, window=9)
    dense, params, rest = nnx_layer()
    options = {"algorithm": "zigzag", "mask": SlidingWindow(9), **SHARDED}
    ours, *_ = nnx_layer(attention_fn=flax_attention_fn(**options))

    def apply(graph, mask, params, x):
        return library("nnx").merge(graph, params, rest)(x, mask=mask)

    documents = Documents(segment_ids)
    assert_same(partial(apply, dense, mask[:, None]), partial(apply, ours, documents), params, x, g)


def test_flax_attention_fn_in_linen():
    """Traced ids, planned in the step."""
    x, g, segment_ids, mask = batch(1)
    dense = linen_layer()
    ours = linen_layer(attention_fn=flax_attention_fn(algorithm="balanced", **SHARDED))
    of_batch = lambda params, x: ours.apply(params, x, mask=Documents(segment_ids))
    params = dense.init(KEY, x)
    assert_same(lambda p, x: dense.apply(p, x, mask=mask[:, None]), of_batch, params, x, g)


def test_a_placement():
    """Tokens in placed order; the whole batch on every device of "data"."""
    x, g, segment_ids, mask = batch(2)
    placement = place_tokens(segment_ids=segment_ids, world_size=4)
    options = {**SHARDED, "batch_axis": (), "algorithm": "placed"}
    ours = linen_layer(attention_fn=flax_attention_fn(**options))
    dense = linen_layer()

    def placed(params, x):
        out = ours.apply(params, placement.apply(x), mask=placement.documents)
        return placement.restore(out)

    params = dense.init(KEY, x)
    assert_same(lambda p, x: dense.apply(p, x, mask=mask[:, None]), placed, params, x, g)


@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (TypeError, "mask is of type Array.*Pass mask=Documents", {"mask": jnp.ones((T, T), bool)}),
        (
            NotImplementedError,
            r"got a dropout rate of 0\.1.*deterministic=True",
            {"dropout_rate": 0.1},
        ),
        (NotImplementedError, "got bias", {"bias": jnp.zeros((1, HEADS, T, T))}),
        (NotImplementedError, "got sow_weights", {"module": object()}),
        (NotImplementedError, "got qk_attn_weights_einsum", {"qk_attn_weights_einsum": jnp.einsum}),
    ],
)
def test_what_layers_may_pass_and_attention_lacks(error, message, arguments):
    q = jnp.zeros((B, T, HEADS, 8))
    with pytest.raises(error, match=f"flax_attention_fn: {message}"):
        FLAX(q, q, q, **arguments)


def test_causal_or_not():
    q = jnp.zeros((B, T, HEADS, 8))
    full = flax_attention_fn(algorithm="ring", mask="full", **SHARDED)
    with pytest.raises(ValueError, match="got is_causal=True from the layer, but mask=Full\\(\\)"):
        full(q, q, q, is_causal=True)


def test_layers_pass_what_is_refused():
    """The libraries pass these arguments on to the adapters, under the names that these read."""
    x = jnp.zeros((B, T, FEATURES))
    linen = linen_layer(attention_fn=FLAX, dropout_rate=0.1)
    with pytest.raises(NotImplementedError, match=r"got a dropout rate of 0\.1"):
        linen.init({"params": KEY, "dropout": KEY}, x, deterministic=False)
    with pytest.raises(NotImplementedError, match="got sow_weights"):
        linen.init(KEY, x, deterministic=True, sow_weights=True)
    nnx = library("nnx")
    layer = nnx.merge(*nnx_layer(attention_fn=FLAX, dropout_rate=0.1))
    with pytest.raises(NotImplementedError, match=r"got a dropout rate of 0\.1"):
        layer(x, deterministic=False)
    with pytest.raises(TypeError, match="mask is of type"):
        layer(x, mask=nnx.make_causal_mask(x[..., 0]), deterministic=True)
    with pytest.raises(NotImplementedError, match="got sow_weights"):
        layer(x, deterministic=True, sow_weights=True)
