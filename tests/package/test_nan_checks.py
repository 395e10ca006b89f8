"""JAX's checks for NaN around a step: what they find, and that a right step raises nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd

W, T = 2, 32
IDS = np.repeat([[1, 2, 0]], [20, 8, 4], axis=1)  # padding rows attend to nothing
ATTEND = partial(
    cpd.context_parallel_attention, axis_name=AXIS, algorithm="balanced", segment_ids=IDS
)


def loss(q):
    out = ATTEND(q, q, q, mesh=mesh_of(W))
    checkify.debug_check(jnp.isfinite(out).all(), "attention is not finite")
    return out.sum()


@pytest.fixture(scope="module")
def inputs():
    """Right queries, and queries of which one row is NaN."""
    right = np.random.default_rng(0).normal(size=(1, T, 2, 8)).astype(np.float32)
    wrong = right.copy()
    wrong[0, 5] = np.nan
    return right, wrong


def test_debug_nans(inputs):
    right, wrong = inputs
    gradient = jax.jit(jax.grad(loss))
    with jax.debug_nans(True):
        assert jnp.isfinite(gradient(right)).all()
        # JAX runs the program again, operation by operation, to find the first NaN. For any
        # shard_map it may recurse instead.
        with pytest.raises((FloatingPointError, RecursionError)):
            gradient(wrong)


def test_checkify(inputs):
    """The checks of the caller; those that `checkify` adds do not enter shard_map."""
    right, wrong = inputs
    checked = jax.jit(checkify.checkify(jax.value_and_grad(loss)))
    assert checked(right)[0].get() is None
    assert "attention is not finite" in checked(wrong)[0].get()
    with pytest.raises((TypeError, ValueError)):
        jax.eval_shape(checkify.checkify(loss, errors=checkify.float_checks), right)
