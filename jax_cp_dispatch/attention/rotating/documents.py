"""The tokens to which each token attends: its document, its causal part, or a window."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Integer

from jax_cp_dispatch._window import Reach
from jax_cp_dispatch.planner.blocks import document_starts, running_max


def attended_tokens(
    segment_ids: Integer[Array, "B T"] | None,
    positions: Integer[Array, "B T"] | None,
    *,
    shape: tuple[int, int],
    reach: Reach,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns each token's range of tokens [start, end) in its batch row; empty for padding.

    Args:
      segment_ids, positions: of the whole sequence, in order; None: each row is one document.
      shape: B and T.
      reach: the number of tokens before and after itself to which a token attends.
    """
    num_tokens = shape[1]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if segment_ids is None:
        start, end = jnp.zeros(shape, jnp.int32), jnp.full(shape, num_tokens, jnp.int32)
        live = jnp.ones(shape, bool)
    else:
        start = document_starts(segment_ids, positions)
        live = start >= 0
        is_last = jnp.pad(start[:, 1:] != start[:, :-1], ((0, 0), (0, 1)), constant_values=True)
        last = jnp.where(is_last, token, num_tokens)
        end = 1 - jnp.flip(running_max(jnp.flip(-last, axis=1)), axis=1)
    left, right = reach.clipped(num_tokens)
    if left is not None:
        start = jnp.maximum(start, (token - left)[None])
    if right is not None:
        end = jnp.minimum(end, (token + right + 1)[None])
    return jnp.where(live, start, 0), jnp.where(live, end, 0)
