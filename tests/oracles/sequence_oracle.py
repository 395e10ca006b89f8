"""Layers along documents in NumPy float64: plain loops over tokens, document by document.

Every function takes one document: arrays whose first axis is its tokens.
"""

from typing import Any

import numpy as np


def documents(segment_ids):
    """Returns (batch row, first, end) of each run of a positive id."""
    found = []
    for row, ids in enumerate(np.asarray(segment_ids)):
        first = 0
        for t in range(1, len(ids) + 1):
            if t == len(ids) or ids[t] != ids[first]:
                if ids[first] > 0:
                    found.append((row, first, t))
                first = t
    return found


def shift(x, offset, fill=0.0):
    out = np.full(x.shape, fill, x.dtype)
    for t in range(len(x)):
        if 0 <= t - offset < len(x):
            out[t] = x[t - offset]
    return out


def causal_conv(x, weight, bias: Any = 0.0):
    width = len(weight)
    out = np.zeros(x.shape) + bias
    for t in range(len(x)):
        for i in range(width):
            if t - (width - 1) + i >= 0:
                out[t] += weight[i] * x[t - (width - 1) + i]
    return out


def causal_conv_gradients(x, weight, g):
    """Returns the gradients of x, weight and bias for the cotangent `g` of the output."""
    width = len(weight)
    dx, dweight = np.zeros(x.shape), np.zeros(weight.shape)
    for t in range(len(x)):
        for i in range(width):
            source = t - (width - 1) + i
            if source >= 0:
                dx[source] += weight[i] * g[t]
                dweight[i] += x[source] * g[t]
    return dx, dweight, g.sum(0)


def recurrence(q, k, v, log_decay, beta=None, *, scale, g=None):
    """The delta rule, or without `beta` linear attention, of one document [T, N, ...].

    Returns the output; with a cotangent `g`, also the gradients of the arrays, by a reverse loop.
    """
    (num_tokens, num_heads, columns), groups = v.shape, k.shape[1]
    group = num_heads // groups
    q, k = (np.repeat(x, group, 1) for x in (q, k))
    decay = np.exp(log_decay.reshape(num_tokens, num_heads, -1, 1))  # [T, N, 1 or H, 1]
    rate = np.ones((num_tokens, num_heads, 1)) if beta is None else beta[..., None]
    outer = lambda a, b: a[..., None] * b[:, None]
    read = lambda state, key: np.einsum("nhv,nh->nv", state, key)
    out, before = np.zeros(v.shape), [np.zeros((num_heads, k.shape[2], columns))]
    erases = beta is not None
    for t in range(num_tokens):
        left = decay[t] * before[t]
        added = rate[t] * (v[t] - erases * read(left, k[t]))
        before.append(left + outer(k[t], added))
        out[t] = scale * read(before[-1], q[t])
    if g is None:
        return out
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dlog, drate, dstate = np.zeros(log_decay.shape), np.zeros(rate.shape), np.zeros(before[0].shape)
    for t in reversed(range(num_tokens)):
        left = decay[t] * before[t]
        error = v[t] - erases * read(left, k[t])
        dq[t] = scale * np.einsum("nhv,nv->nh", before[t + 1], g[t])
        dstate = dstate + scale * outer(q[t], g[t])
        dadded = read(dstate, k[t])
        drate[t] = (dadded * error).sum(1, keepdims=True)
        dv[t] = rate[t] * dadded
        dk[t] = np.einsum("nhv,nv->nh", dstate, rate[t] * error)
        dk[t] -= erases * np.einsum("nhv,nv->nh", left, dv[t])
        dleft = dstate - erases * outer(k[t], dv[t])
        of_channels = (dleft * left).sum(2)
        dlog[t] = of_channels if log_decay.ndim == 3 else of_channels.sum(1)
        dstate = decay[t] * dleft
    dq, dk = (x.reshape(num_tokens, groups, group, -1).sum(2) for x in (dq, dk))
    return out, dq, dk, dv, dlog, *([drate[..., 0]] if erases else [])


def linear_recurrence(x, log_decay, g):
    """Returns h, and the gradients of x and log_decay."""
    h, state = np.zeros(x.shape), np.zeros(x.shape[1:])
    for t in range(len(x)):
        h[t] = state = np.exp(log_decay[t]) * state + x[t]
    dx, ddecay, dstate = np.zeros(x.shape), np.zeros(x.shape), np.zeros(x.shape[1:])
    for t in reversed(range(len(x))):
        dx[t] = dstate = dstate + g[t]
        if t:
            ddecay[t] = dstate * np.exp(log_decay[t]) * h[t - 1]
        dstate = np.exp(log_decay[t]) * dstate
    return h, dx, ddecay
