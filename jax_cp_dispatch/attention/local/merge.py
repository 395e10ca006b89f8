"""Merges two attention results over disjoint keys into the result over both."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch.attention.local.sink import add_sink, check_sink


def merge_partials(
    out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B N T"],
    block_out: Float[Array, "B T N Hv"],
    block_lse: Float[Array, "B N T"],
    *,
    sink: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Merges two attention results, weighted by their shares of the softmax's denominator.

    Call anywhere. Associative and commutative up to rounding; `(0, -inf)` is the neutral element
    and does not change the other side. Differentiable in all arguments; if both sides are
    `-inf`, the result is `(0, -inf)` with zero gradients.

    Args:
      out: output over the keys seen so far; zero where `lse` is `-inf`.
      lse: their logarithm of the sum of exponentials.
      block_out: output over further keys.
      block_lse: the same for the further keys.
      sink: a logit per head without a value, see `local_attention`. Pass it with the last part
        only: it joins the denominator once.
    Returns:
      out, lse: over all keys, in float32 (float64 if an argument is float64).
    Raises:
      ValueError: shapes do not match.
    References:
      Dao, FlashAttention (arXiv:2205.14135), section 3.1.
    """
    B, T, N = out.shape[:3]
    if block_out.shape != out.shape or lse.shape != (B, N, T) or block_lse.shape != lse.shape:
        raise ValueError(
            f"merge_partials: out {out.shape}, lse {lse.shape}, block_out {block_out.shape}, "
            f"block_lse {block_lse.shape} do not match; with out [B, T, N, Hv] both lse must be "
            "[B, N, T]."
        )
    check_sink("merge_partials", sink, N)
    dtype = sum_dtype(*(x.dtype for x in (out, lse, block_out, block_lse)))
    out, lse, block_out, block_lse = (x.astype(dtype) for x in (out, lse, block_out, block_lse))

    # The peak cancels, so it needs no derivative; a finite one keeps -inf minus -inf from NaN.
    peak = lax.stop_gradient(jnp.maximum(lse, block_lse))
    peak = jnp.where(peak > -jnp.inf, peak, 0)
    weight, block_weight = jnp.exp(lse - peak), jnp.exp(block_lse - peak)
    total = weight + block_weight
    empty = total == 0
    total = jnp.where(empty, 1, total)

    def per_row(share):
        return jnp.swapaxes(share, 1, 2)[..., None]

    merged = per_row(weight / total) * out + per_row(block_weight / total) * block_out
    return add_sink(merged, jnp.where(empty, -jnp.inf, peak + jnp.log(total)), sink)
