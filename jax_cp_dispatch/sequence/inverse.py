"""The inverse of unit lower triangular matrices, by blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_cp_dispatch.sequence.chunks import blocks_of_four, dot

# Matrices below this size are multiplied as sums: XLA makes a call of each product of a batch.
_SMALL = 8


@jax.custom_jvp
def inverse_of_unit_lower(a: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Returns (I + a)^-1 for strictly lower triangular `a`; C is a power of two.

    By diagonal blocks of size 1, 2, 4, ...: each is the inverse of a diagonal block of I + a, so it
    stays as small as the result. (Products of powers, by doubling, lose all digits if keys repeat.)
    """
    size = 1
    out = jnp.ones((*a.shape[:-1], 1, 1), a.dtype)
    while size < a.shape[-1]:
        pairs = out.reshape(*out.shape[:-3], -1, 2, size, size)
        left, right = pairs[..., 0, :, :], pairs[..., 1, :, :]
        below = _below_diagonal(a, size)
        lower = -_product(_product(right, below), left)
        out = blocks_of_four(left, lower, right)
        size *= 2
    return out[..., 0, :, :]


@inverse_of_unit_lower.defjvp
def _jvp(primals, tangents):
    inverse = inverse_of_unit_lower(*primals)
    return inverse, -dot(dot(inverse, tangents[0]), inverse)


def _below_diagonal(a: Float[Array, "*batch C C"], size: int) -> Array:
    """Returns the blocks below each second diagonal block of this size, [*batch, n, size, size]."""
    n = a.shape[-1] // (2 * size)
    blocks = a.reshape(*a.shape[:-2], n, 2 * size, n, 2 * size)[..., size:, :, :size]
    return jnp.einsum("...aiaj->...aij", blocks)


def _product(a: Array, b: Array) -> Array:
    if a.shape[-1] < _SMALL:
        return (a[..., None] * b[..., None, :, :]).sum(-2)
    return dot(a, b)
