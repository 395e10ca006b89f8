"""cuDNN's flash attention, `[B, N, T, H]`, in plain JAX: the assumed semantics of its calls.

Values that cuDNN leaves undefined are NaN here.
"""

import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType
from jax.nn import logsumexp


def _logits(q, k, kv_lengths, mask_type, scale, layout, sliding_window_length):
    assert layout == AttentionLayout.BNTH.value and sliding_window_length is None
    T, S = q.shape[2], k.shape[2]
    row, column = jnp.arange(T)[:, None], jnp.arange(S)
    if mask_type is MaskType.CAUSAL:  # aligned at the top left
        assert S >= T
        allowed = (column <= row)[None]
    else:
        assert mask_type is MaskType.PADDING
        allowed = jnp.broadcast_to(column < kv_lengths[:, None, None], (q.shape[0], T, S))
    logits = scale * jnp.einsum("bnth,bnsh->bnts", q, k)
    return jnp.where(allowed[:, None], logits, -jnp.inf), allowed


def _float32(q, *others):
    """Converts all to float32 and repeats keys and values for each query head."""
    repeated = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in others)
    return [x.astype(jnp.float32) for x in (q, *repeated)]


class Forward:
    """Replaces JAX's primitive."""

    @staticmethod
    def bind(q, k, v, bias, q_lengths, kv_lengths, *rest, mask_type, scale, is_training, **options):
        assert is_training
        wide, k, v = _float32(q, k, v)
        logits, _ = _logits(wide, k, kv_lengths, mask_type, scale, *_used(options))
        lse = logsumexp(logits, axis=3)
        return jnp.exp(logits - lse[..., None]).astype(q.dtype).astype(jnp.float32) @ v, lse


class Backward:
    """Likewise; uses the given `lse` and `out`, whatever these keys would give."""

    @staticmethod
    def bind(q, k, v, bias, q_lengths, kv_lengths, *rest, mask_type, scale, **options):
        lse, out, dout = rest[-3:]
        wide_q, wide_k, wide_v, wide_out, wide_dout = _float32(q, k, v, out, dout)
        logits, allowed = _logits(wide_q, wide_k, kv_lengths, mask_type, scale, *_used(options))
        p = jnp.exp(logits - lse[..., None])
        delta = jnp.sum(wide_out * wide_dout, axis=3, keepdims=True)
        ds = scale * p * (jnp.einsum("bnth,bnsh->bnts", wide_dout, wide_v) - delta)
        undefined = jnp.where(jnp.any(allowed, axis=1), 0, jnp.nan)[:, None, :, None]

        def of_keys(dx, x):
            B, K, S, H = x.shape
            return jnp.sum(dx.reshape(B, K, -1, S, H), axis=2).astype(x.dtype) + undefined

        dk = of_keys(jnp.einsum("bnts,bnth->bnsh", ds, wide_q), k)
        dv = of_keys(jnp.einsum("bnts,bnth->bnsh", p, wide_dout), v)
        return (ds @ wide_k).astype(q.dtype), dk, dv


def _used(options):
    assert options["dropout_rate"] == 0 and options["variadic_args"] == (False, False)
    return options["layout"], options["sliding_window_length"]
