"""Layers of Equinox in `equinox_attention` equal the same layers with a dense mask."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from layers import FEATURES, HEADS, MISSING, SHARDED, B, T, assert_same, batch

from jax_cp_dispatch import Documents
from jax_cp_dispatch.adapters import equinox_attention

equinox = pytest.importorskip("equinox", reason=MISSING)

KEY = jax.random.key(0)


def equinox_layer(**options):
    sizes = {"num_heads": HEADS, "query_size": FEATURES, "use_query_bias": True}
    return equinox.nn.MultiheadAttention(**sizes, key=KEY, **options)


def test_equinox():
    """With rotary embeddings."""
    x, g, segment_ids, mask = batch(3)
    layer = equinox_layer(qk_size=8, vo_size=4)
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
        options = {"algorithm": "hamilton", "process_heads": rotate, **SHARDED}
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
