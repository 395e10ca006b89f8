"""`jax.vmap` around matmuls of global arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def with_examples(run: Callable[..., Any], *, has_dy: bool = False):
    """The same function, which also runs under `jax.vmap`.

    Where x alone is mapped, the new dimension is one more of the batch. Where weights are, it is
    the first dimension of all arrays, and `run` sees that by the dimensions of w. So it is of
    derivatives, where each example has a gradient of w.

    Args:
      run: called with static parts, and x, w and others, some of which may be None.
      has_dy: the last array is the gradient of the result.
    """

    def call(s, *arrays, **static):
        @custom_vmap
        def mapped(*arrays):
            return run(s, *arrays, **static)

        @mapped.def_vmap
        def _(size, is_mapped, *arrays):
            had_examples = arrays[1].ndim - is_mapped[1] == 3
            of_all = has_dy or had_examples or any(flag is True for flag in is_mapped[1:])
            arrays = [
                a if a is None or flag or not (of_all or i == 0) else _repeated(size, a)
                for i, (a, flag) in enumerate(zip(arrays, is_mapped, strict=True))
            ]
            if not had_examples:
                results = call(s, *arrays, **static)
            else:  # of two vmaps: all pairs of examples stand one after another
                join = lambda a: a.reshape(-1, *a.shape[2:])
                split = lambda a: a.reshape(size, -1, *a.shape[1:])
                results = jax.tree.map(split, call(s, *jax.tree.map(join, arrays), **static))
            return results, jax.tree.map(lambda _: True, results)

        return mapped(*arrays)

    return call


def _repeated(size: int, array):
    return jnp.broadcast_to(array, (size, *array.shape))
