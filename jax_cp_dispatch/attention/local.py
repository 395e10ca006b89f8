"""Exact attention of local queries over one contiguous range of local keys each, block by block.

Layout inside the loops. Logits are held transposed, `[K, block_kv, G * block_q]`: the G query heads
of one KV head and the rows of a query block share the minor axis, so K and V are never repeated,
the softmax reduces over a major axis, and all seven products (two forward, five backward) are plain
`[m, k] x [k, n]` matmuls. `rows` below ends in `[rows, features]`, `columns` in `[features, rows]`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_cp_dispatch._varying import vary_alike, vary_like
from jax_cp_dispatch.attention.blocks import cut, from_columns, from_rows, to_columns, to_rows

_MIN_BLOCK = 16
_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    logit_soft_cap: float | None
    block_q: int
    block_kv: int


def local_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    kv_start: Int[Array, "B T"],
    kv_end: Int[Array, "B T"],
    *,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Attends query row i of a batch row to its key rows `[kv_start[i], kv_end[i])`.

    Call anywhere: under `jit`, inside or outside `jax.shard_map` (both values of `check_vma`),
    under `remat` and `scan`. Nothing of size `T * S` is ever held, and key blocks that no row of a
    query block names are skipped at run time; under `vmap` all elements wait for the longest, so
    prefer the axis B for batching. Bitwise repeatable.

    Query head n reads KV head `n // (N / K)`. Rows that nobody uses are not read: neither key rows
    outside every range nor query rows with an empty range influence a result or a gradient, even
    if they hold NaN. A NaN in a key row that somebody attends may reach other queries.

    Differentiable once, in reverse mode, in `out` and `lse` with respect to `q`, `k`, `v`;
    accumulated in float32 and rounded once to their dtype.

    Args:
      q: queries; bfloat16, float16, float32 or float64, as `k` and `v`.
      k: keys; N must be a multiple of K.
      v: values.
      kv_start: first key row of each query. Ranges are clipped to `[0, S]`.
      kv_end: one past the last key row; a range that ends where or before it starts is empty.
      scale: factor on the logits, `1 / sqrt(H)` if None.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      block_q: query rows per block; None chooses from the shapes.
      block_kv: key rows per block; None chooses from the shapes.
    Returns:
      out: float32 (float64 for float64 inputs), zero where the range is empty.
      lse: logarithm of the sum of the exponentials of the logits; `-inf` where the range is empty.
    Raises:
      TypeError: dtypes that are not as above, or ranges that are not integers.
      ValueError: shapes that do not belong together, or an option out of its domain.
    References:
      Dao, FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2.
    """
    options = _check(
        "local_attention", q, k, v, kv_start, kv_end, scale, logit_soft_cap, block_q, block_kv
    )
    return _attention(options, *vary_alike([q, k, v, kv_start, kv_end]))


def local_attention_backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    kv_start: Int[Array, "B T"],
    kv_end: Int[Array, "B T"],
    out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B N T"],
    dout: Float[Array, "B T N Hv"],
    dlse: Float[Array, "B N T"] | None = None,
    *,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
    """Gradients of merged attention with respect to one set of held keys.

    `out` and `lse` are those of the whole softmax, `k`, `v` and the ranges any part of its keys:
    the parts' `dq` add up, `dk` and `dv` are final. With only one part this is the derivative of
    `local_attention`. Call where `local_attention` may be called. Not differentiable.

    Args:
      q, k, v, kv_start, kv_end, scale, logit_soft_cap, block_q, block_kv: as `local_attention`.
      out: merged output.
      lse: merged logarithm of the sum of exponentials; `-inf` gives zero gradients.
      dout: cotangent of `out`.
      dlse: cotangent of `lse`; None is zero.
    Returns:
      dq, dk, dv: in float32 (float64 for float64 inputs), not yet rounded to the inputs' dtype.
    Raises:
      TypeError, ValueError: as `local_attention`.
    """
    name = "local_attention_backward"
    options = _check(name, q, k, v, kv_start, kv_end, scale, logit_soft_cap, block_q, block_kv)
    out_shape, lse_shape = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    dlse = jnp.zeros(lse_shape, lse.dtype) if dlse is None else dlse
    for what, x, shape in (
        ("out", out, out_shape),
        ("lse", lse, lse_shape),
        ("dout", dout, out_shape),
        ("dlse", dlse, lse_shape),
    ):
        if x.shape != shape:
            raise ValueError(f"{name}: {what} has shape {x.shape}, but q and v need {shape}.")
    return _backward(options, *vary_alike([q, k, v, kv_start, kv_end, out, lse, dout, dlse]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, kv_start, kv_end):
    return _forward(options, q, k, v, kv_start, kv_end)


def _attention_fwd(options, q, k, v, kv_start, kv_end):
    out, lse = _forward(options, q, k, v, kv_start, kv_end)
    return (out, lse), (q, k, v, kv_start, kv_end, out, lse)


def _attention_bwd(options, residuals, cotangents):
    grads = _backward(options, *residuals, *cotangents)
    return *(g.astype(x.dtype) for g, x in zip(grads, residuals[:3], strict=True)), None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


class _Blocks(NamedTuple):
    """Operands cut in blocks; the first axis counts the blocks of all batch rows."""

    q: Array  # [B*nq, block_q, K, G, H], zero in rows with an empty range
    k: Array  # [B*nk, block_kv, K, H], zero in rows that nobody attends
    v: Array  # [B*nk, block_kv, K, Hv], likewise
    used: Array  # [B, T] rows with a non-empty range
    start: Array  # [B*nq, G*block_q]
    end: Array  # [B*nq, G*block_q]
    first: Array  # [B*nq] first block of k to visit
    last: Array  # [B*nq] one past the last


def _cut_in_blocks(options, q, k, v, kv_start, kv_end) -> _Blocks:
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    # Constant ranges are common, and XLA takes seconds to fold what follows from them.
    kv_start, kv_end = lax.optimization_barrier((kv_start, kv_end))
    start = jnp.clip(kv_start, 0, S).astype(jnp.int32)
    end = jnp.clip(kv_end, 0, S).astype(jnp.int32)
    used = start < end
    start, end = jnp.where(used, start, S), jnp.where(used, end, 0)

    # 0 * NaN is NaN, so rows that carry no weight are cleared before the matmuls read them.
    row = jnp.arange(B)[:, None]
    step = used.astype(jnp.int32)
    edges = jnp.zeros((B, S + 1), jnp.int32).at[row, start].add(step).at[row, end].add(-step)
    attended = (jnp.cumsum(edges, axis=1)[:, :S] > 0)[:, :, None, None]
    k, v = jnp.where(attended, k, 0), jnp.where(attended, v, 0)
    q = jnp.where(used[:, :, None, None], q, 0).reshape(B, T, K, N // K, H)

    start, end = cut(start, options.block_q, S), cut(end, options.block_q, 0)
    num_kv_blocks = -(-S // options.block_kv)
    batch_row = jnp.repeat(jnp.arange(B), start.shape[0] // B)
    low, high = jnp.min(start, axis=1), jnp.max(end, axis=1)
    first = batch_row * num_kv_blocks + low // options.block_kv
    last = batch_row * num_kv_blocks + -(-high // options.block_kv)
    return _Blocks(
        q=cut(q, options.block_q),
        k=cut(k, options.block_kv),
        v=cut(v, options.block_kv),
        used=used,
        start=jnp.tile(start, (1, N // K)),
        end=jnp.tile(end, (1, N // K)),
        first=first,
        last=last,
    )


@functools.partial(jax.jit, static_argnums=0)
def _forward(options, q, k, v, kv_start, kv_end):
    B, T, N, _ = q.shape
    K, Hv = v.shape[2:]
    dtype = _accumulator(q)
    if B * T * N * k.shape[1] == 0:
        empty = jnp.zeros((B, T, N, Hv), dtype), jnp.full((B, N, T), -jnp.inf, dtype)
        return tuple(vary_like(empty, q))
    blocks = _cut_in_blocks(options, q, k, v, kv_start, kv_end)
    k_rows, v_columns = to_rows(blocks.k), to_columns(blocks.v)
    rows = blocks.start.shape[1]

    def one_query_block(_, block):
        q_columns, start, end, first, last = block

        def add_block(j, carry):
            peak, total, acc = carry
            allowed = _allowed(options, j, start, end, k.shape[1])
            logits, _ = _logits(options, _matmul(k_rows[j], q_columns), allowed)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
            p = lax.optimization_barrier(jnp.exp(logits - new_peak[:, None]))
            keep = jnp.exp(peak - new_peak)
            total = total * keep + jnp.sum(p, axis=1)
            acc = acc * keep[:, None] + _matmul(v_columns[j], p.astype(v.dtype))
            return new_peak, total, acc

        # A finite first peak keeps exp(-inf - peak) = 0 where nothing has been allowed yet.
        init = (
            jnp.full((K, rows), jnp.finfo(dtype).min),
            jnp.zeros((K, rows), dtype),
            jnp.zeros((K, Hv, rows), dtype),
        )
        init = tuple(vary_like(init, q))
        peak, total, acc = lax.fori_loop(first, last, add_block, init)
        empty = total == 0
        total = jnp.where(empty, 1, total)
        lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
        return None, (acc / total[:, None], lse)

    xs = (to_columns(blocks.q), blocks.start, blocks.end, blocks.first, blocks.last)
    _, (out, lse) = lax.scan(one_query_block, None, xs)
    out = from_columns(out, q.shape)
    lse = from_columns(lse[:, :, None], q.shape)[..., 0]
    return out, jnp.swapaxes(lse, 1, 2)


@functools.partial(jax.jit, static_argnums=0)
def _backward(options, q, k, v, kv_start, kv_end, out, lse, dout, dlse):
    B, T, N, _ = q.shape
    S, K, Hv = v.shape[1:]
    dtype = _accumulator(q)
    if B * T * N * S == 0:
        return tuple(vary_like((jnp.zeros(x.shape, dtype) for x in (q, k, v)), q))
    blocks = _cut_in_blocks(options, q, k, v, kv_start, kv_end)
    k_rows, k_columns, v_rows = to_rows(blocks.k), to_columns(blocks.k), to_rows(blocks.v)

    # dL/dlogit_j = p_j (dout . v_j - dout . out + dlse), since dlse/dlogit_j = p_j.
    dout, lse, dlse = dout.astype(dtype), jnp.swapaxes(lse, 1, 2), jnp.swapaxes(dlse, 1, 2)
    used = blocks.used[:, :, None] & (lse > -jnp.inf)
    delta = jnp.where(used, jnp.sum(dout * out, axis=-1) - dlse, 0)
    lse = jnp.where(used, lse, jnp.inf)  # exp(logit - inf) = 0
    dout = jnp.where(used[..., None], dout, 0)
    heads = (B, T, K, N // K)
    delta = to_columns(cut(delta.reshape(*heads, 1), options.block_q))
    lse = to_columns(cut(lse.reshape(*heads, 1), options.block_q, jnp.inf))
    dout = cut(dout.reshape(*heads, Hv).astype(v.dtype), options.block_q)

    def one_query_block(carry, block):
        q_rows, q_columns, dout_rows, dout_columns, lse, delta, start, end, first, last = block

        def add_block(j, carry):
            dq, dk, dv = carry
            allowed = _allowed(options, j, start, end, S)
            logits, slope = _logits(options, _matmul(k_rows[j], q_columns), allowed)
            p = jnp.exp(logits - lse)
            ds = p * (_matmul(v_rows[j], dout_columns) - delta) * slope
            p, ds = p.astype(q.dtype), ds.astype(q.dtype)
            dv = dv.at[j].add(_matmul(p, dout_rows))
            dk = dk.at[j].add(_matmul(ds, q_rows))
            return dq + _matmul(k_columns[j], ds), dk, dv

        (dq,) = vary_like([jnp.zeros(q_columns.shape, dtype)], q_columns)
        dq, *carry = lax.fori_loop(first, last, add_block, (dq, *carry))
        return tuple(carry), dq

    xs = (
        to_rows(blocks.q),
        to_columns(blocks.q),
        to_rows(dout),
        to_columns(dout),
        lse,
        delta,
        blocks.start,
        blocks.end,
        blocks.first,
        blocks.last,
    )
    init = tuple(vary_like((jnp.zeros(x.shape, dtype) for x in (k_rows, v_rows)), q))
    (dk, dv), dq = lax.scan(one_query_block, init, xs)
    dq, dk = dq * options.scale, dk * options.scale
    return from_columns(dq, q.shape), from_rows(dk, k.shape), from_rows(dv, v.shape)


def _logits(options, products, allowed):
    """Scaled, capped and masked logits, and the derivative of the capped by the scaled ones."""
    logits, slope = products * options.scale, 1
    cap = options.logit_soft_cap
    if cap is not None:
        ratio = jnp.tanh(logits / cap)
        logits, slope = cap * ratio, 1 - ratio * ratio
    return jnp.where(allowed, logits, -jnp.inf), slope


def _allowed(options, block, start, end, S):
    """Which of the keys (rows) of a block each query (column) attends."""
    num_blocks = -(-S // options.block_kv)
    position = block % num_blocks * options.block_kv + jnp.arange(options.block_kv)[:, None]
    return (position >= start) & (position < end)


def _matmul(x, y):
    """`[K, m, k] x [K, k, n] -> [K, m, n]`, exact products, accumulated in float32 or wider."""
    return lax.dot_general(
        x,
        y,
        (((2,), (1,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=_accumulator(x),
    )


def _accumulator(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _check(name, q, k, v, kv_start, kv_end, scale, logit_soft_cap, block_q, block_kv) -> _Options:
    if q.dtype not in _FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"{name}: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}, but must all be "
            "bfloat16, float16, float32 or float64, the same. Cast them."
        )
    for what, x in (("kv_start", kv_start), ("kv_end", kv_end)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: {what} has dtype {x.dtype}, but counts rows. Pass integers.")
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"{name}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}, but need four axes "
            "each: [B, T, N, H], [B, S, K, H], [B, S, K, Hv]."
        )
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    if k.shape != (B, S, K, H) or v.shape[:3] != (B, S, K):
        raise ValueError(
            f"{name}: k and v have shapes {k.shape} and {v.shape}, but q of shape {q.shape} needs "
            f"[{B}, S, K, {H}] and [{B}, S, K, Hv]."
        )
    if K == 0 or N % K:
        raise ValueError(
            f"{name}: {N} query heads cannot share {K} KV heads; N must be a multiple of K."
        )
    if kv_start.shape != (B, T) or kv_end.shape != (B, T):
        raise ValueError(
            f"{name}: kv_start and kv_end have shapes {kv_start.shape} and {kv_end.shape}, but q "
            f"of shape {q.shape} needs one range per query row, [{B}, {T}]."
        )
    if logit_soft_cap is not None and not logit_soft_cap > 0:
        raise ValueError(f"{name}: logit_soft_cap is {logit_soft_cap}, but must be > 0, or None.")
    for what, block in (("block_q", block_q), ("block_kv", block_kv)):
        if block is not None and block < 1:
            raise ValueError(f"{name}: {what} is {block}, but must be >= 1, or None.")
    return _Options(
        scale=H**-0.5 if scale is None else float(scale),
        logit_soft_cap=None if logit_soft_cap is None else float(logit_soft_cap),
        block_q=block_q or _default_block(T, 256),
        block_kv=block_kv or _default_block(S, 256),
    )


def _default_block(length, block):
    """`block`, or for a shorter axis its length, rounded up for the vector units."""
    return min(block, max(1, -(-length // _MIN_BLOCK)) * _MIN_BLOCK)
