"""Sinks: a learned logit per head without a value, added to a complete softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_cp_dispatch._arguments import check_array
from jax_cp_dispatch.attention.local.backward import SoftmaxGradients


def check_sink(op: str, sink: Any, num_heads: int) -> None:
    """Requires one number per query head, or None."""
    if sink is None:
        return
    check_array(op, "sink", sink)
    if not jnp.issubdtype(sink.dtype, jnp.floating):
        raise TypeError(f"{op}: sink has dtype {sink.dtype}, but holds logits. Pass floats.")
    if sink.shape != (num_heads,):
        raise ValueError(
            f"{op}: sink has shape {list(sink.shape)}, but needs one logit per query head, "
            f"[{num_heads}]."
        )


def add_sink(
    out: Float[Array, "B T N Hv"], lse: Float[Array, "B N T"], sink: Float[Array, "*B N"] | None
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Adds `exp(sink)` to the denominators of rows with keys; other rows stay (0, -inf)."""
    if sink is None:
        return out, lse
    sink = lax.expand_dims(sink.astype(lse.dtype)[..., None], range(lse.ndim - sink.ndim - 1))
    share = jax.nn.sigmoid(lse - sink)
    out = out * jnp.swapaxes(share, 1, 2)[..., None]
    return out, jnp.where(lse > -jnp.inf, jnp.logaddexp(lse, sink), -jnp.inf)


def sink_gradient(sink: Float[Array, " N"], whole: SoftmaxGradients) -> Float[Array, " N"]:
    """Returns the gradient of the sink over these rows, in its dtype.

    A sink is a key whose value is 0, so dL/dsink = -p (dout . out - dlse), with p = exp(sink - lse)
    and out and lse of the softmax with the sink. Keys need no other rule than without a sink.
    """
    out, lse, dout, dlse = whole
    delta = jnp.swapaxes(jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1), 1, 2)
    delta = delta if dlse is None else delta - dlse
    p = jnp.exp(sink.astype(lse.dtype)[None, :, None] - lse)
    used = lse > -jnp.inf
    return -jnp.sum(jnp.where(used, p * delta, 0), axis=(0, 2)).astype(sink.dtype)
