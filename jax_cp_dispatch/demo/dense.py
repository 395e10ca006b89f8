"""Dense causal attention of one document in NumPy, forward and backward: the reference."""

import numpy as np

_ROWS = 256  # queries at a time, so that a document of any length fits in memory


def dense_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the output and the gradients of `sum(out * dout)`.

    Args:
      q, dout: `[T, N, H]`.
      k, v: `[T, K, H]`; query head n reads KV head `n // (N / K)`.
    Returns:
      out, dq `[T, N, H]` and dk, dv `[T, K, H]`, computed in the dtype of q.
    """
    T, N, H = q.shape
    group = N // k.shape[1]
    scale = np.asarray(1 / np.sqrt(H), q.dtype)
    out, dq = np.zeros((2, *q.shape), q.dtype)
    dk, dv = np.zeros((2, *k.shape), q.dtype)
    for n in range(N):
        keys, values = (np.ascontiguousarray(x[:, n // group]) for x in (k, v))
        for begin in range(0, T, _ROWS):
            rows = slice(begin, min(begin + _ROWS, T))
            seen = slice(0, rows.stop)  # causal: no later key takes part
            queries = q[rows, n] * scale
            p = queries @ keys[seen].T
            p[:, begin:][np.triu_indices(rows.stop - begin, 1)] = -np.inf
            p -= p.max(1, keepdims=True)
            np.exp(p, out=p)
            p /= p.sum(1, keepdims=True)
            out[rows, n] = p @ values[seen]
            cotangent = dout[rows, n]
            dv[seen, n // group] += p.T @ cotangent
            dlogits = cotangent @ values[seen].T
            dlogits -= np.sum(cotangent * out[rows, n], axis=1, keepdims=True)
            dlogits *= p
            dq[rows, n] = dlogits @ keys[seen] * scale
            dk[seen, n // group] += dlogits.T @ queries
    return out, dq, dk, dv
