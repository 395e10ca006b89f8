"""The inverse of unit lower triangular matrices, by blocks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jax_cp_dispatch.sequence.chunks import dot

# Matrices below this size are multiplied as sums: XLA makes a call of each product of a batch.
_SMALL = 8


@jax.custom_jvp
def inverse_of_unit_lower(a: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Returns (I + a)^-1 for strictly lower triangular `a`; C is a power of two.

    By diagonal blocks of size 2, 4, ...: each is the inverse of a diagonal block of I + a, so it
    stays as small as the result. (Products of powers, by doubling, lose all digits if keys repeat.)
    """
    below, diagonal = [], a[..., None, :, :]  # of blocks [..., n, size, size], n = 1, 2, 4, ...
    while (half := diagonal.shape[-1] // 2) > 1:
        below.append(diagonal[..., half:, :half])
        halves = diagonal[..., :half, :half], diagonal[..., half:, half:]
        diagonal = lax.collapse(jnp.stack(halves, -3), a.ndim - 2, a.ndim)
    out = jnp.asarray(np.eye(diagonal.shape[-1], dtype=a.dtype)) - diagonal
    for block in reversed(below):
        pairs = out.reshape(*block.shape[:-2], 2, *out.shape[-2:])
        left, right = pairs[..., 0, :, :], pairs[..., 1, :, :]
        lower = -_product(_product(right, block), left)
        upper = jnp.concatenate([left, jnp.zeros_like(left)], -1)
        out = jnp.concatenate([upper, jnp.concatenate([lower, right], -1)], -2)
    return out[..., 0, :, :]


@inverse_of_unit_lower.defjvp
def _jvp(primals, tangents):
    inverse = inverse_of_unit_lower(*primals)
    return inverse, -dot(dot(inverse, tangents[0]), inverse)


def _product(a: Array, b: Array) -> Array:
    if a.shape[-1] < _SMALL:
        return (a[..., None] * b[..., None, :, :]).sum(-2)
    return dot(a, b)
