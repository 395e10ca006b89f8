"""cuDNN's flash attention, `[B, T, N, H]`, in plain JAX: the assumed semantics of its calls."""

import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType
from jax.nn import logsumexp


def _logits(q, k, mask_type, scale, layout, sliding_window_length):
    assert layout == AttentionLayout.BTNH.value and sliding_window_length is None
    T, S = q.shape[1], k.shape[1]
    logits = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    if mask_type is MaskType.NO_MASK:
        return logits
    assert mask_type is MaskType.CAUSAL and S == T
    return jnp.where(jnp.tri(T, S, dtype=bool), logits, -jnp.inf)


def _float32(q, *others):
    """Converts all to float32 and repeats keys and values for each query head."""
    repeated = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in others)
    return [x.astype(jnp.float32) for x in (q, *repeated)]


class Forward:
    """Replaces JAX's primitive."""

    @staticmethod
    def bind(q, k, v, *rest, mask_type, scale, is_training, **options):
        assert is_training and [x.size for x in rest] == [0] * 7
        wide, k, v = _float32(q, k, v)
        logits = _logits(wide, k, mask_type, scale, *_used(options))
        lse = logsumexp(logits, axis=3)
        out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(logits - lse[..., None]), v)
        return out.astype(q.dtype), lse


class Backward:
    """Likewise; uses the given `lse` and `out`, whatever these keys would give."""

    @staticmethod
    def bind(q, k, v, *rest, mask_type, scale, **options):
        lse, out, dout = rest[-3:]
        wide_q, wide_k, wide_v, wide_out, wide_dout = _float32(q, k, v, out, dout)
        logits = _logits(wide_q, wide_k, mask_type, scale, *_used(options))
        p = jnp.exp(logits - lse[..., None])
        delta = jnp.einsum("btnh,btnh->bnt", wide_out, wide_dout)
        ds = scale * p * (jnp.einsum("btnh,bsnh->bnts", wide_dout, wide_v) - delta[..., None])

        def of_keys(dx, x):
            return jnp.sum(dx.reshape(*x.shape[:3], -1, x.shape[3]), axis=3).astype(x.dtype)

        dq = jnp.einsum("bnts,bsnh->btnh", ds, wide_k).astype(q.dtype)
        dk = of_keys(jnp.einsum("bnts,btnh->bsnh", ds, wide_q), k)
        return dq, dk, of_keys(jnp.einsum("bnts,btnh->bsnh", p, wide_dout), v)


def _used(options):
    assert options["dropout_rate"] == 0 and options["variadic_args"] == (False, False)
    return options["layout"], options["sliding_window_length"]
