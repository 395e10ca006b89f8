"""Every method of both overlapped matmuls by name, their operands, and comparisons of results.

Small integers are exact in every method; other values are within the tolerance of their type.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch import all_gather_matmul
from jax_cp_dispatch.buffers import CommOverlapMethod

GATHERING: dict[str, Any] = {
    "none": {"method": "none"},
    "ring": {"method": "ring"},
    "ring, atomic": {"method": CommOverlapMethod.RING_EXCHANGE, "atomic": True},
    "ring, pairs": {"method": "ring_exchange", "aggregate": True},  # an even number of ranks
    "ring, no copies": {"method": "ring", "use_ce": False},
    "ring, atomic, no copies": {"method": "ring", "atomic": True, "use_ce": False},
    "xla": {"method": "ring", "implementation": "xla"},
}
SCATTERING: dict[str, Any] = {
    "none": {"method": CommOverlapMethod.NONE},
    "ring": {"method": "ring"},
    "ring, atomic": {"method": "ring", "atomic": True},
    "ring, no copies": {"method": "ring", "use_ce": False},
    "pipeline of 1": {"method": "pipeline", "num_splits": 1},
    "pipeline of 3": {"method": "PIPELINE", "num_splits": 3},
    "pipeline of more than columns": {"method": "pipeline", "num_splits": 100},
    "pipeline, atomic": {"method": "pipeline", "atomic": True},
    "pipeline, first gemm": {"method": "pipeline", "rs_overlap_first_gemm": True},
    "xla": {"method": "pipeline", "implementation": "xla"},
}
K, N = 5, 7


def methods(op, num_ranks):
    """Returns each method of a matmul by name."""
    table = GATHERING if op is all_gather_matmul else SCATTERING
    fits = lambda options: num_ranks % 2 == 0 or not options.get("aggregate")
    return {name: partial(op, **options) for name, options in table.items() if fits(options)}


def with_gathered(op, num_ranks):
    """Each method; methods that gather keep the tokens for the derivative, or gather them again."""
    ways = methods(op, num_ranks)
    if op is not all_gather_matmul:
        return ways
    both = itertools.product(ways.items(), ("keep", "again"))
    return {f"{name}, {how}": partial(fn, gathered=how) for (name, fn), how in both}


def with_gradients(ways, dy, *operands):
    """Returns the result and the gradients of each way."""
    results = {}
    for name, fn in ways.items():
        out, pull = jax.vjp(fn, *operands)
        results[name] = out, *pull(dy)
    return results


def integers(seed, *shape, dtype: Any = np.float32):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def normal(seed, *shape, dtype: Any = np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def equal(got, want, name: Any = ""):
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want, err_msg=str(name))


def close(got, want, dtype, name=""):
    """Compares within the type's tolerance, for wide types relative to the largest element."""
    largest = np.abs(want).max(initial=0)
    rtol, atol = {
        "bfloat16": (2e-2, 2e-3),
        "float16": (1e-3, 1e-3),
        "float32": (0, 1e-5 * largest),
        "float64": (0, 1e-13 * largest),
    }[jnp.dtype(dtype).name]
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=str(name))


def of_gather(num_ranks, batch, tokens, draw=integers, **options):
    """x, w and bias of `all_gather_matmul`, per rank."""
    shapes = (*batch, tokens, K), (K, N), (N,)
    return [draw(seed, num_ranks, *shape, **options) for seed, shape in enumerate(shapes)]


def of_scatter(num_ranks, batch, tokens, draw=integers, **options):
    """x, w, and one bias for all ranks, of `matmul_reduce_scatter`."""
    x, w, bias = of_gather(num_ranks, batch, tokens, draw, **options)
    return x, w, np.stack([bias[0]] * num_ranks)


def with_nan_behind(x, counts):
    """Returns x with NaN in the rows that no rank may read."""
    x = x.copy()
    for rank, count in enumerate(counts or ()):
        x[rank][..., count:, :] = np.nan
    return x
