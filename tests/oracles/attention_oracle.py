"""NumPy float64 attention over key ranges, with handwritten gradients."""

import numpy as np


def allowed_keys(kv_start, kv_end, num_keys):
    """`[B, T, S]`: the keys that each query attends to."""
    position = np.arange(num_keys)
    start, end = np.asarray(kv_start, np.int64)[..., None], np.asarray(kv_end, np.int64)[..., None]
    return (position >= start) & (position < end)


def _weights(q, k, allowed, scale, logit_soft_cap):
    """Slope of the logits, probabilities `[B, N, T, S]` and lse `[B, N, T]`."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    heads_per_group = q.shape[2] // k.shape[2]
    k = np.repeat(k, heads_per_group, axis=2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    logits = scale * np.einsum("btnh,bsnh->bnts", q, k)
    slope = np.full_like(logits, scale)
    if logit_soft_cap is not None:
        ratio = np.tanh(logits / logit_soft_cap)
        logits, slope = logit_soft_cap * ratio, slope * (1 - ratio**2)
    mask = allowed[:, None]
    exponentials = np.where(mask, np.exp(np.where(mask, logits, 0)), 0)
    total = exponentials.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    return slope, exponentials / np.where(total > 0, total, 1)[..., None], lse


def attention(q, k, v, kv_start, kv_end, scale=None, logit_soft_cap=None):
    """`(out [B, T, N, Hv], lse [B, N, T])`; moderate logits only, since no peak is subtracted."""
    return masked_attention(
        q, k, v, allowed_keys(kv_start, kv_end, k.shape[1]), scale, logit_soft_cap
    )


def masked_attention(q, k, v, allowed, scale=None, logit_soft_cap=None):
    """Likewise for the pairs of a boolean mask, `[B, T, S]`."""
    _, p, lse = _weights(q, k, allowed, scale, logit_soft_cap)
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    return np.einsum("bnts,bsnh->btnh", p, v), lse


def attention_gradients(q, k, v, kv_start, kv_end, dout, dlse, scale=None, logit_soft_cap=None):
    """`(dq, dk, dv)` for the cotangents `dout [B, T, N, Hv]` and `dlse [B, N, T]`."""
    allowed = allowed_keys(kv_start, kv_end, k.shape[1])
    return masked_attention_gradients(q, k, v, allowed, dout, dlse, scale, logit_soft_cap)


def masked_attention_gradients(q, k, v, allowed, dout, dlse, scale=None, logit_soft_cap=None):
    """Likewise for the pairs of a boolean mask, `[B, T, S]`."""
    slope, p, _ = _weights(q, k, allowed, scale, logit_soft_cap)
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    num_groups = k.shape[2]
    heads_per_group = q.shape[2] // num_groups
    k, v = (np.repeat(x, heads_per_group, axis=2) for x in (k, v))
    dp = np.einsum("btnh,bsnh->bnts", dout, v)
    row = (p * dp).sum(-1) - np.asarray(dlse, np.float64)
    ds = p * (dp - row[..., None]) * slope
    dq = np.einsum("bnts,bsnh->btnh", ds, k)
    dk = np.einsum("bnts,btnh->bsnh", ds, q)
    dv = np.einsum("bnts,btnh->bsnh", p, dout)

    def sum_groups(x):
        return x.reshape(*x.shape[:2], num_groups, heads_per_group, x.shape[3]).sum(3)

    return dq, sum_groups(dk), sum_groups(dv)
