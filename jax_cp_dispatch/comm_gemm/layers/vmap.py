"""`jax.vmap` around matmuls of global arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def with_examples(run: Callable[..., Any], *, has_dy: bool = False):
    """Returns the same function with support for `jax.vmap`.

    If only x is mapped, the new dimension becomes a batch dimension. If weights are mapped, it is
    the first dimension of all arrays, which `run` recognizes by the dimensions of w. The same holds
    for derivatives, where each example has its own gradient of w.

    Args:
      run: function of static parts, x, w and other arrays, some of which may be None.
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
            else:  # two vmaps: all pairs of examples, in order
                join = lambda a: a.reshape(-1, *a.shape[2:])
                split = lambda a: a.reshape(size, -1, *a.shape[1:])
                results = jax.tree.map(split, call(s, *jax.tree.map(join, arrays), **static))
            return results, jax.tree.map(lambda _: True, results)

        return mapped(*arrays)

    return call


def _repeated(size: int, array):
    return jnp.broadcast_to(array, (size, *array.shape))
