"""Selected attention from its definition, in NumPy float64, one token and head at a time.

Arrays are in packed order; `sees(q, k)` is the mask, of positions in a document (`mask_oracle`).
"""

import itertools
from typing import Any

import mask_oracle
import numpy as np


def documents(segment_ids):
    """Yields (batch row, first column, length) of each document."""
    for b, row in enumerate(np.asarray(segment_ids)):
        cuts = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]
        for first, last in itertools.pairwise(cuts):
            if first < last and row[first] > 0:
                yield b, int(first), int(last - first)


def keys_seen(mask, length):
    """Returns the positions that each query of a document sees."""
    position = np.arange(length)
    return [position[mask_oracle.sees(mask, q, position)] for q in position]


def scores_of(q_index, k_index, weights, relu=True):
    """Scores of one query with keys: q_index `[J, d]`, k_index `[keys, d]`, weights `[J]`."""
    total = np.zeros(len(k_index))
    for j, q in enumerate(q_index):
        product = k_index @ q
        product = np.maximum(product, 0) if relu else product
        total += product if weights is None else weights[j] * product
    return total


def pick_keys(scores, seen, own, *, num_keys, block, pool, local):
    """Returns the picks of one query, ascending: of `scores` `[keys seen]` at positions `seen`."""
    of_block = {}
    for p, score in zip(seen, scores, strict=True):
        of_block.setdefault(int(p) // block, []).append(score)
    reduce = {"max": np.max, "mean": np.mean}[pool]
    pooled = {p: reduce(x) for p, x in of_block.items()}

    def rank(p):
        forced = local and p == own // block
        return not forced, bool(np.isnan(pooled[p])), -np.nan_to_num(pooled[p], nan=0.0), p

    return sorted(sorted(pooled, key=rank)[:num_keys])


def select(q_index, k_index, weights, segment_ids, mask, **options):
    """Returns picks `[B, T, G, k]`: q_index `[B, T, G, J, d]`, k_index `[B, T, G, d]`."""
    relu, k = options.pop("relu", True), options["num_keys"]
    B, T, G = q_index.shape[:3]
    picks = np.full((B, T, G, k), -1)
    for b, first, length in documents(segment_ids):
        for (own, seen), g in itertools.product(enumerate(keys_seen(mask, length)), range(G)):
            t, rows = first + own, k_index[b, first + seen, g].astype(np.float64)
            of_heads = None if weights is None else weights[b, t, g]
            scores = scores_of(q_index[b, t, g].astype(np.float64), rows, of_heads, relu)
            found = pick_keys(scores, seen, own, **options)
            picks[b, t, g, : len(found)] = found
    return picks


def pairs(picks, segment_ids, mask, block):
    """`[B, G, T, T]`: which columns each token has picked and sees."""
    B, T, G, _ = picks.shape
    seen = np.zeros((B, G, T, T), bool)
    for b, first, length in documents(segment_ids):
        for (own, keys), g in itertools.product(enumerate(keys_seen(mask, length)), range(G)):
            picked = set(picks[b, first + own, g].tolist()) - {-1}
            at = [first + p for p in keys if p // block in picked]
            seen[b, g, first + own, at] = True
    return seen


def _of_head(q, k, seen, scale, cap, sink):
    """Logits, their slope, lse and probabilities of one query head: q `[T, H]`, seen `[T, S]`."""
    logits, slope = scale * q @ k.T, scale
    if cap is not None:
        ratio = np.tanh(logits / cap)
        logits, slope = cap * ratio, scale * (1 - ratio**2)
    raised = np.where(seen, np.exp(logits), 0)
    total = raised.sum(1) + np.where(seen.any(1), 0 if sink is None else np.exp(sink), 0)
    with np.errstate(divide="ignore"):
        return logits, slope, np.log(total), raised / np.where(total > 0, total, 1)[:, None]


def attention(arrays, seen, *, scale=None, cap=None, sink=None):
    """Returns out, lse `[B, T, N]`, and the pull back of cotangents of out and lse.

    `arrays` are q, k, v; seen `[B, G, T, T]`, of one group of heads, all KV heads or all heads.
    """
    q, k, v = (np.asarray(x, np.float64) for x in arrays)
    (B, T, N, H), K, G = q.shape, k.shape[2], seen.shape[1]
    scale = H**-0.5 if scale is None else scale
    out, lse = np.zeros((B, T, N, v.shape[3])), np.zeros((B, T, N))
    heads = list(itertools.product(range(B), range(N)))
    of_head = lambda b, n: ((b, n * G // N), n * K // N)
    found = {}
    for b, n in heads:
        group, kv = of_head(b, n)
        one = q[b, :, n], k[b, :, kv], seen[group], scale, cap, None if sink is None else sink[n]
        found[b, n] = _of_head(*one)
        lse[b, :, n], out[b, :, n] = found[b, n][2], found[b, n][3] @ v[b, :, kv]

    def pull(dout, dlse=None):
        dq, dk, dv, dsink = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(N)
        for b, n in heads:
            _, slope, _, p = found[b, n]
            kv, g = n * K // N, np.asarray(dout, np.float64)[b, :, n]
            delta = (g * out[b, :, n]).sum(1) - (0 if dlse is None else dlse[b, :, n])
            ds = p * (g @ v[b, :, kv].T - delta[:, None]) * slope
            dq[b, :, n] += ds @ k[b, :, kv]
            dk[b, :, kv] += ds.T @ q[b, :, n]
            dv[b, :, kv] += p.T @ g
            if sink is not None:
                share = np.exp(sink[n] - lse[b, :, n], where=lse[b, :, n] > -np.inf, out=0 * delta)
                dsink[n] -= (share * delta).sum()
        return (dq, dk, dv) if sink is None else (dq, dk, dv, dsink)

    return out, lse, pull


def _float64(x: Any) -> Any:
    return None if x is None else np.float64(x)


def index_loss(
    index, arrays, segment_ids, seen, *, relu=True, scale=None, cap=None, sink=None
) -> Any:
    """Returns the loss `[B, T]`, and the pull back to q_index, k_index and weights.

    `index` are q_index `[B, T, G, J, d]`, k_index `[B, T, G, d]` and weights `[B, T, G, J]` or
    None; `arrays` are q and k of attention; seen `[B, G, T, T]`. The loss of several groups is
    their mean, and a group's target is of its own query heads.
    """
    q_index, k_index, weights = map(_float64, index)
    q, k = (np.asarray(x, np.float64) for x in arrays)
    (B, T, N, H), K, G = q.shape, k.shape[2], q_index.shape[2]
    scale = H**-0.5 if scale is None else scale
    loss, found = np.zeros((B, T)), {}
    for b, g in itertools.product(range(B), range(G)):
        heads = range(g * N // G, (g + 1) * N // G)
        of = lambda n, b=b, g=g: (q[b, :, n], k[b, :, n * K // N], seen[b, g % seen.shape[1]])
        sinks = [None if sink is None else sink[n] for n in heads]
        shares = [_of_head(*of(n), scale, cap, x)[3] for n, x in zip(heads, sinks, strict=True)]
        p = np.sum(shares, axis=0)
        for t in np.flatnonzero(seen[b, g % seen.shape[1]].any(1)):
            at = np.flatnonzero(seen[b, g % seen.shape[1], t])
            target = p[t, at] / p[t, at].sum()
            of_heads = None if weights is None else weights[b, t, g]
            scores = scores_of(q_index[b, t, g], k_index[b, at, g], of_heads, relu)
            log_share = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
            with np.errstate(divide="ignore", invalid="ignore"):
                loss[b, t] += (
                    np.where(target > 0, target * (np.log(target) - log_share), 0).sum() / G
                )
            found[b, t, g] = at, np.exp(log_share) - target

    def pull(dloss):
        dq, dk = np.zeros_like(q_index), np.zeros_like(k_index)
        dw = None if weights is None else np.zeros_like(weights)
        for (b, t, g), (at, slope) in found.items():
            of_scores = dloss[b, t] * slope / G
            for j in range(q_index.shape[3]):
                product = k_index[b, at, g] @ q_index[b, t, g, j]
                passes = (product > 0) if relu else np.ones_like(product)
                w = 1 if weights is None else weights[b, t, g, j]
                dq[b, t, g, j] += (of_scores * w * passes) @ k_index[b, at, g]
                dk[b, at, g] += np.outer(of_scores * w * passes, q_index[b, t, g, j])
                if dw is not None:
                    dw[b, t, g, j] += of_scores @ (product * passes)
        return dq, dk, dw

    return loss, pull
