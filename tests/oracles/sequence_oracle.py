"""Layers along documents in NumPy float64: plain loops over tokens, document by document.

Every function takes one document: arrays whose first axis is its tokens. `by_document` applies it
to a packed batch.
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


def by_document(function, segment_ids, *arrays, like):
    """Applies `function` to each document of arrays [B, T, ...]; padding is zero, as in `like`."""
    out = np.zeros(like, np.float64)
    for row, first, end in documents(segment_ids):
        out[row, first:end] = function(*(np.asarray(x, np.float64)[row, first:end] for x in arrays))
    return out


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
    (num_tokens, heads, columns), group = v.shape, v.shape[1] // k.shape[1]
    out = np.zeros(v.shape)
    given = (q, k, v, log_decay) if beta is None else (q, k, v, log_decay, beta)
    gradients = [np.zeros(x.shape) for x in given]
    for n in range(heads):
        state, states = np.zeros((k.shape[2], columns)), []
        queries, keys = q[:, n // group], k[:, n // group]
        decay = np.exp(log_decay[:, n].reshape(num_tokens, -1, 1))  # [T, 1 or H, 1]
        for t in range(num_tokens):
            states.append(state)
            left = decay[t] * state
            added = v[t, n] if beta is None else beta[t, n] * (v[t, n] - left.T @ keys[t])
            state = left + np.outer(keys[t], added)
            out[t, n] = scale * state.T @ queries[t]
        if g is None:
            continue
        dstate = np.zeros_like(state)
        for t in reversed(range(num_tokens)):
            left, key = decay[t] * states[t], keys[t]
            error = v[t, n] - left.T @ key
            added = v[t, n] if beta is None else beta[t, n] * error
            gradients[0][t, n // group] += scale * (left + np.outer(key, added)) @ g[t, n]
            dstate = dstate + scale * np.outer(queries[t], g[t, n])
            dadded = dstate.T @ key
            gradients[1][t, n // group] += dstate @ added
            dleft = dstate
            if beta is None:
                gradients[2][t, n] = dadded
            else:
                gradients[4][t, n] = dadded @ error
                gradients[2][t, n] = derror = beta[t, n] * dadded
                gradients[1][t, n // group] -= left @ derror
                dleft = dstate - np.outer(key, derror)
            each = (dleft * left).sum(1)
            gradients[3][t, n] += each if log_decay.ndim == 3 else each.sum()
            dstate = decay[t] * dleft
    return out if g is None else (out, *gradients)


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
