"""What local attention accepts: the checks of its arguments, and the options of its passes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._window import Reach, check_window
from jax_cp_dispatch.attention.checks import check_arrays

_VECTOR = 8  # rows
# Rows of a block's matrix. On CPU, XLA multiplies 256 x 256 blocks with heads of 64 on one thread
# (65 of 125 GFLOP/s on 2 cores), 512 x 512 on all; larger blocks compute more in vain.
_BLOCK = 512
# Of the blocks of several heads: larger products and passes wait less often for all threads (2
# cores: 2.3 s without, 1.8 s with 4 heads, 8K tokens forward and backward).
_LOGITS = 4 * _BLOCK * _BLOCK
_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static, with nothing left to choose."""

    scale: float
    logit_soft_cap: float | None
    window: int | Reach | None
    block_q: int
    block_kv: int
    block_heads: int  # KV heads of a batch row whose blocks are computed together
    # Query rows of a contiguous piece of the sequence, where the rows of a call hold several.
    piece_rows: int | None = None


def check(
    name,
    q,
    k,
    v,
    *,
    scale,
    logit_soft_cap,
    window=None,
    block_q=None,
    block_kv=None,
    block_heads=None,
) -> Options:
    """Raises what `local_attention` documents; `name` is the function that the user called."""
    check_operands(name, q, k, v)
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    scale, logit_soft_cap = check_softmax(name, scale, logit_soft_cap)
    window = check_window(name, window)
    for what, number in (("block_q", block_q), ("block_kv", block_kv)):
        is_integer = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
        if number is not None and not (is_integer and number >= 1):
            raise ValueError(f"{name}: {what} is {number}, but must be an integer >= 1, or None.")
    is_integer = isinstance(block_heads, (int, np.integer))
    if block_heads is not None and not (is_integer and block_heads in _divisors(K)):
        raise ValueError(
            f"{name}: block_heads is {block_heads}, but must be an integer that divides the {K} KV "
            "heads, or None."
        )
    block_q = block_q or even_block(T, max(128, _BLOCK // (N // K)))
    block_kv = block_kv or even_block(S, _BLOCK)
    return Options(
        scale=H**-0.5 if scale is None else scale,
        logit_soft_cap=logit_soft_cap,
        window=min(window, 2**31 - 1) if isinstance(window, int) else window,
        block_q=block_q,
        block_kv=block_kv,
        block_heads=int(block_heads or _heads_together(K, N // K * block_q * block_kv)),
    )


def check_operands(name, q, k, v) -> None:
    """Of the arrays: dtypes, and shapes that belong together."""
    check_arrays(name, q=q, k=k, v=v)
    if q.dtype not in _FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"{name}: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}, but must all be "
            "bfloat16, float16, float32 or float64, the same. Cast them."
        )
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"{name}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}, but need four axes "
            "each: [B, T, N, H], [B, S, K, H], [B, S, K, Hv]."
        )
    B, _, N, H = q.shape
    S, K = k.shape[1:3]
    if k.shape != (B, S, K, H) or v.shape[:3] != (B, S, K):
        raise ValueError(
            f"{name}: k and v have shapes {k.shape} and {v.shape}, but q of shape {q.shape} needs "
            f"[{B}, S, K, {H}] and [{B}, S, K, Hv]."
        )
    if K == 0 or N == 0 or N % K:
        raise ValueError(
            f"{name}: {N} query heads cannot share {K} KV heads; N must be a multiple of K."
        )
    for heads, size in (("q and k", H), ("v", v.shape[3])):
        if size == 0:
            raise ValueError(
                f"{name}: heads of {heads} have size 0; they need one feature at least."
            )


def check_softmax(name, scale, logit_soft_cap) -> tuple[float | None, float | None]:
    """The numbers as floats."""
    scale = _number(name, "scale", scale)
    logit_soft_cap = _number(name, "logit_soft_cap", logit_soft_cap)
    if logit_soft_cap is not None and not logit_soft_cap > 0:
        raise ValueError(f"{name}: logit_soft_cap is {logit_soft_cap}, but must be > 0, or None.")
    return scale, logit_soft_cap


def check_ranges(name, q, kv_start, kv_end) -> None:
    """Likewise of the ranges."""
    check_arrays(name, kv_start=kv_start, kv_end=kv_end)
    for what, x in (("kv_start", kv_start), ("kv_end", kv_end)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: {what} has dtype {x.dtype}, but counts rows. Pass integers.")
    B, T = q.shape[:2]
    if kv_start.shape != (B, T) or kv_end.shape != (B, T):
        raise ValueError(
            f"{name}: kv_start and kv_end have shapes {kv_start.shape} and {kv_end.shape}, but q "
            f"of shape {q.shape} needs one range per query row, [{B}, {T}]."
        )


def _number(name, what, value) -> float | None:
    try:
        if not isinstance(value, bool | np.bool_):
            return None if value is None else float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"{name}: {what} is {value!r}, but must be a number that is known when the program is "
        "traced, or None."
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _heads_together(num_groups: int, logits_of_head: int) -> int:
    """As many KV heads as divide their number and hold `_LOGITS` at most, at least one."""
    return max(x for x in _divisors(num_groups) if x == 1 or x * logits_of_head <= _LOGITS)


def blocks_of_ranks(num_queries, num_keys, num_heads, num_groups, *, rows) -> dict[str, int]:
    """Block sizes for ranks that attend at the same time.

    They keep all cores busy between them, so a product need not feed several threads; small blocks
    of one head stay in the caches and follow the ranges closely. `rows` are those of a query
    block's matrix.
    """
    block_q = max(64, rows * num_groups // max(1, num_heads))
    return {
        "block_q": even_block(num_queries, block_q),
        "block_kv": even_block(num_keys, 128),
        "block_heads": 1,
    }


def even_block(length: int, block: int) -> int:
    """The size near `block`, of whole vectors, whose blocks cover the length with the least rest.

    The largest of several; for a short axis its length, rounded up.
    """
    if length <= block * 3 // 2:
        return max(1, -(-length // _VECTOR)) * _VECTOR
    sizes = range(block * 3 // 4 // _VECTOR * _VECTOR, block * 5 // 4 + 1, _VECTOR)
    return min(sizes, key=lambda size: (-length % size, -size))
