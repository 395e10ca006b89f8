"""Layers over a sharded sequence, compared with the same layers and a dense mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from packed_batches import pack

B, T, FEATURES, HEADS = 2, 64, 16, 4
MESH = jax.make_mesh((2, 4), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
SHARDED = {"mesh": MESH, "axis_name": "cp", "batch_axis": "data", "head_axis": ()}
MISSING = "the library that the adapter is for is not installed: install the test extra"


def batch(seed, window=None):
    """Tokens, a cotangent that is zero for padding, segment ids, and the dense mask."""
    rng = np.random.default_rng(seed)
    segment_ids, _ = pack(rng, B, T, max_length=40)
    x, g = rng.normal(size=(2, B, T, FEATURES)).astype(np.float32)
    before = np.subtract.outer(np.arange(T), np.arange(T))
    mask = (segment_ids[:, :, None] == segment_ids[:, None]) & (before >= 0)
    if window is not None:
        mask &= before < window
    return x, g * (segment_ids != 0)[..., None], segment_ids, mask


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
