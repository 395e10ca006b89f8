"""docs/limits.md: the answers of its table of attention, compared with dense attention in NumPy."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cp_dispatch as cpd

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "limits.md").read_text()
T = 32
ROW, COLUMN = np.arange(T)[:, None], np.arange(T)


@pytest.fixture(scope="module")
def names():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    values: dict = {}
    exec(code, values)
    return values


def dense(names, mask, sink=None):
    """Attention of [1, T, N, H] under a mask [T, T]; `sink` [N] joins the denominator."""
    q, k, v = (np.asarray(names[x][0], np.float64) for x in "qkv")
    logits = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(np.where(mask, logits, -np.inf))
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(np.asarray(sink, np.float64))[:, None, None]
    return np.einsum("nts,snh->tnh", weights / total, v)[None]


CAUSAL = COLUMN <= ROW
MASKS = {
    "streaming_out": CAUSAL & ((COLUMN < 4) | (ROW - COLUMN < 8)),
    "sink_out": CAUSAL,
}


@pytest.mark.parametrize("name", MASKS)
def test_recipes_equal_dense_attention(names, name):
    sink = names["sink"] if name == "sink_out" else None
    expected = dense(names, MASKS[name], sink)
    np.testing.assert_allclose(names[name], expected, atol=1e-5)  # float32 sums of 32 keys


def test_a_query_is_decoded_from_a_cache(names):
    expected = dense(names, CAUSAL)[:, 19:20]
    np.testing.assert_allclose(names["new"], expected, atol=1e-5)


def test_gradients_flow_into_the_sinks(names):
    q, k, v, i, zero = (jnp.asarray(names[x]) for x in ("q", "k", "v", "i", "zero"))

    def total(sink):
        return cpd.local_attention(q, k, v, zero, i + 1, sink=sink)[0].sum()

    sink = np.asarray(names["sink"], np.float64)
    step = 1e-4 * np.eye(len(sink))
    around = [[dense(names, CAUSAL, sink + sign * x).sum() for x in step] for sign in (1, -1)]
    slope = (np.array(around[0]) - np.array(around[1])) / 2e-4
    # float32 sums of 2,048 elements against float64 differences
    np.testing.assert_allclose(jax.grad(total)(names["sink"]), slope, rtol=1e-3, atol=1e-4)
