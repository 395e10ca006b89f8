"""Layers of Equinox, NNX and Linen by the adapters equal the same layers with a dense mask."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from mask_oracle import batch_pairs
from packed_batches import pack

from jax_cp_dispatch import Documents, place_tokens
from jax_cp_dispatch.adapters import equinox_attention, flax_attention_fn
from jax_cp_dispatch.masks import SlidingWindow

B, T, FEATURES, HEADS = 2, 32, 16, 4
MESH = jax.make_mesh((2, 4), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
SHARDED = {"mesh": MESH, "axis_name": "cp", "batch_axis": "data", "head_axis": ()}
MISSING = "the library that the adapter is for is not installed: install the test extra"


def library(name) -> Any:
    """Imports it in the process that needs it: that takes longer than most tests."""
    return pytest.importorskip(name, reason=MISSING)


def batch(seed, mask: Any = "causal"):
    """Tokens, a cotangent that is zero for padding, segment ids, and the dense mask."""
    rng = np.random.default_rng(seed)
    segment_ids, _ = pack(rng, B, T, max_length=20)
    x, g = rng.normal(size=(2, B, T, FEATURES)).astype(np.float32)
    padding = (segment_ids == 0)[..., None]  # sees something, so that nothing is NaN
    return x, np.where(padding, 0, g), segment_ids, batch_pairs(mask, segment_ids) | padding


def assert_same(dense, ours, params, x, g):
    """Compares values and gradients of two functions of parameters and tokens."""

    @partial(jax.jit, static_argnums=0)
    def run(layer, params, x):
        weighted = lambda params, x: jnp.vdot(layer(params, x), g)
        return jax.value_and_grad(weighted, argnums=(0, 1))(params, x)

    got = run(ours, params, jax.device_put(x, NamedSharding(MESH, P("data", "cp"))))
    want = run(dense, params, x)
    assert len(jax.tree.leaves(got)) > 6
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))


# ---- Equinox.


def equinox_layer(**options):
    sizes = {"num_heads": HEADS, "query_size": FEATURES, "use_query_bias": True}
    return library("equinox").nn.MultiheadAttention(**sizes, key=KEY, **options)


def test_equinox():
    """With rotary embeddings."""
    x, g, segment_ids, mask = batch(3)
    equinox, layer = library("equinox"), equinox_layer(qk_size=8, vo_size=4)
    turn = jnp.exp(1j * jnp.arange(T)[:, None, None] / 10.0 ** jnp.arange(4))
    params, rest = equinox.partition(layer, equinox.is_array)

    def rotate(q, k, v):
        pairs = (jax.lax.complex(*jnp.split(x, 2, axis=-1)) * turn for x in (q, k))
        return *(jnp.concatenate([x.real, x.imag], -1) for x in pairs), v

    def dense(params, x):
        of_row = partial(equinox.combine(params, rest), process_heads=rotate)
        return jax.vmap(lambda x, mask: of_row(x, x, x, mask))(x, mask)

    def ours(params, x):
        layer, documents = equinox.combine(params, rest), Documents(segment_ids)
        options = {"algorithm": "ring", "process_heads": rotate, **SHARDED}
        return equinox_attention(layer, x, x, x, documents, **options)

    assert_same(dense, ours, params, x, g)


def test_what_callers_may_pass_and_attention_lacks(unchecked_types):
    x = jnp.zeros((B, T, FEATURES))
    attend = partial(equinox_attention, algorithm="ring", **SHARDED)
    with pytest.raises(NotImplementedError, match=r"equinox_attention: got a dropout rate of 0\.5"):
        attend(equinox_layer(dropout_p=0.5), x, x, x, key=KEY)
    with pytest.raises(TypeError, match="equinox_attention: mask is of type"):
        attend(equinox_layer(), x, x, x, jnp.ones((T, T), bool))
    at_rest = partial(attend, equinox_layer(dropout_p=0.5), inference=True, key=KEY)
    assert jax.eval_shape(at_rest, x, x, x).shape == x.shape


# ---- Flax.


KEY = jax.random.key(0)
FLAX = flax_attention_fn(algorithm="zigzag", **SHARDED)


def nnx_layer(**options):
    nnx, sizes = library("flax.nnx"), {"num_kv_heads": 2, "in_features": FEATURES}
    options |= {"decode": False, "rngs": nnx.Rngs(0)}
    return nnx.split(nnx.MultiHeadAttention(HEADS, **sizes, **options), nnx.Param, ...)


def linen_layer(**options):
    return library("flax.linen").MultiHeadDotProductAttention(num_heads=HEADS, **options)


def test_flax_attention_fn_in_nnx():
    x, g, segment_ids, mask = batch(0, SlidingWindow(9))
    dense, params, rest = nnx_layer()
    options = {"algorithm": "ring", "mask": SlidingWindow(9), **SHARDED}
    ours, *_ = nnx_layer(attention_fn=flax_attention_fn(**options))

    def apply(graph, mask, params, x):
        return library("flax.nnx").merge(graph, params, rest)(x, mask=mask)

    documents = Documents(segment_ids)
    assert_same(partial(apply, dense, mask[:, None]), partial(apply, ours, documents), params, x, g)


def test_flax_attention_fn_in_linen():
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


def test_what_attention_lacks_is_refused():
    q = jnp.zeros((B, T, HEADS, 8))
    refused: Any = {"bias": jnp.zeros((1, HEADS, T, T)), "qk_attn_weights_einsum": jnp.einsum}
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=f"flax_attention_fn: got {name}"):
            FLAX(q, q, q, **{name: value})
    says = "flax_attention_fn: got is_causal=True from the layer, but mask=Full"
    with pytest.raises(ValueError, match=says):
        flax_attention_fn(algorithm="ring", mask="full", **SHARDED)(q, q, q, is_causal=True)


def test_layers_pass_what_is_refused():
    """The libraries pass these arguments on to the adapters, under the names that these read."""
    x = jnp.zeros((B, T, FEATURES))
    linen = linen_layer(attention_fn=FLAX, dropout_rate=0.1)
    with pytest.raises(NotImplementedError, match=r"got a dropout rate of 0\.1"):
        linen.init({"params": KEY, "dropout": KEY}, x, deterministic=False)
    with pytest.raises(NotImplementedError, match="got sow_weights"):
        linen.init(KEY, x, deterministic=True, sow_weights=True)
    nnx = library("flax.nnx")
    layer = nnx.merge(*nnx_layer(attention_fn=FLAX, dropout_rate=0.1))
    with pytest.raises(NotImplementedError, match=r"got a dropout rate of 0\.1"):
        layer(x, deterministic=False)
    with pytest.raises(TypeError, match="mask is of type"):
        layer(x, mask=nnx.make_causal_mask(x[..., 0]), deterministic=True)
    with pytest.raises(NotImplementedError, match="got sow_weights"):
        layer(x, deterministic=True, sow_weights=True)
