"""What the derivative of a delta rule computes again, of rows in several slices of chunks."""

from functools import partial

import jax
import numpy as np
from jaxprs import runs
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import sequence


def test_matrices_are_inverted_once():
    """An inverse is put together from blocks, and nothing else is: concatenations count them."""
    x, per_head = (np.zeros((1, 512, 8, *size), np.float32) for size in ((16,), ()))
    layer = partial(sequence.gated_delta_rule, mesh=mesh_of(1), axis_name=AXIS, batch_axis=())
    total = lambda *x: layer(*x).sum()
    of_both = jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4))
    forward, both = (
        runs(jax.make_jaxpr(fn)(x, x, x, per_head, per_head).jaxpr) for fn in (total, of_both)
    )
    assert both["exp"] == 2 * forward["exp"]  # factors are computed again
    assert both["concatenate"] == forward["concatenate"] > 0
