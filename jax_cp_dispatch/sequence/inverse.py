"""The inverse of unit lower triangular matrices, by blocks."""

from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Float

from jax_cp_dispatch.sequence.chunks import dot


def pairs_of_halves(size: int) -> Iterator[np.ndarray]:
    """Yields the pairs with a row in the right half of a block and a column in its left half.

    For blocks of 2, 4, ... rows. Every pair below the diagonal is in one of these sets.
    """
    row, column = np.indices((size, size))
    half = 1
    while half < size:
        same_block = row // (2 * half) == column // (2 * half)
        yield same_block & (row % (2 * half) >= half) & (column % (2 * half) < half)
        half *= 2


@jax.custom_jvp
def inverse_of_unit_lower(a: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Returns (I + a)^-1 for strictly lower triangular `a`; C is a power of two.

    By diagonal blocks of size 1, 2, 4, ...: each is the inverse of a diagonal block of I + a, so it
    stays as small as the result. (Products of powers, by doubling, lose all digits if keys repeat.)
    """
    out = np.eye(a.shape[-1], dtype=a.dtype)
    for i, pairs in enumerate(pairs_of_halves(a.shape[-1])):
        below = a * pairs.astype(a.dtype)
        out = out - (dot(dot(out, below), out) if i else below)
    return jax.numpy.broadcast_to(out, a.shape)


@inverse_of_unit_lower.defjvp
def _jvp(primals, tangents):
    inverse = inverse_of_unit_lower(*primals)
    return inverse, -dot(dot(inverse, tangents[0]), inverse)
