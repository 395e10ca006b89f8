"""A layer of experts: one program for all its calls, with its derivative, and its operands."""

from functools import partial
from typing import Any

import experts_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
from on_mesh import AXIS

from jax_cp_dispatch import experts, grouped_gemm

W, T, K, E, D = 4, 6, 3, 8, 5
CAPACITY = 40
OPTIONS: dict[str, Any] = {"num_experts": E, "axis_name": AXIS, "capacity": CAPACITY}


def draw(seed=0, lowest=-1):
    """Returns x, weights, matrices, a cotangent and the index, each by ranks."""
    rng = np.random.default_rng(seed)
    shapes = (W, T, D), (W, T, K), (W, E // W, D, D), (W, T, D)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return *arrays, rng.integers(lowest, E, (W, T, K)).astype(np.int32)


def layer(x, weights, matrices, index, **options):
    """The layer of one rank; if rows may be dropped, by these weights."""
    if options.get("overflow") == "drop":
        options["weights"] = weights
    routing = experts.route(index, **{**OPTIONS, **options})
    rows = experts.dispatch_tokens(x, routing)
    y = jnp.tanh(grouped_gemm(rows, matrices, routing.group_sizes))
    return experts.combine_tokens(y, weights, routing)


def with_gradients(x, weights, matrices, g, index, *, layer=layer, **options):
    """Returns the output of a layer, and the gradients of x, weights and matrices."""
    of_index = partial(layer, index=index, **options)
    out, pull = jax.vjp(lambda *given: of_index(*given), x, weights, matrices)
    return out, *pull(g)


def check_layer(got, operands, **tolerance):
    """Compares the results of `with_gradients` with dense ones."""
    x, weights, matrices, g, index = operands
    flat = matrices.reshape(E, D, D)
    want = (
        oracle.layer(x, weights, index, flat),
        *oracle.layer_gradients(x, weights, index, flat, g),
    )
    for a, b in zip(got, want, strict=True):
        a = np.asarray(a, np.float64).reshape(b.shape)
        np.testing.assert_allclose(a, b, **{"rtol": 1e-5, "atol": 1e-5, **tolerance})
