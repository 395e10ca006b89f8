"""The options of local attention: those of the caller, checked, and those of its passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._arrays import sum_dtype

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def check_heads(name: str, q: Any, k: Any, v: Any) -> None:
    """Requires queries, keys and values of one dtype, whose heads match."""
    if q.dtype not in _FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"{name}: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}, but must have "
            "the same one: bfloat16, float16, float32 or float64. Cast them."
        )
    (N, H), K = q.shape[2:], k.shape[2]
    if K == 0 or N == 0 or N % K:
        raise ValueError(
            f"{name}: {N} query heads cannot share {K} KV heads; N must be a multiple of K."
        )
    for heads, size in (("q and k", H), ("v", v.shape[3])):
        if size == 0:
            raise ValueError(
                f"{name}: heads of {heads} have size 0; they need at least one feature."
            )


def check_result_dtype(name: str, what: str, asked: Any, q: Any) -> Any:
    """Returns the dtype that is asked for: that of q, or by default that of sums."""
    of_operands, of_sums = jnp.dtype(q.dtype), jnp.dtype(sum_dtype(q.dtype))
    if asked is None:
        return of_sums
    if jnp.dtype(asked) not in (of_operands, of_sums):
        raise ValueError(
            f"{name}: {what} is {jnp.dtype(asked)}, but must be the dtype of q, {of_operands}, or "
            f"{of_sums}. Pass one of them, or None for {of_sums}."
        )
    return jnp.dtype(asked)


def check_softmax(name: str, scale: Any, logit_soft_cap: Any) -> None:
    """Requires numbers that are known when a program is traced, or None."""
    _check_number(name, "scale", scale)
    _check_number(name, "logit_soft_cap", logit_soft_cap)
    if logit_soft_cap is not None and not float(logit_soft_cap) > 0:
        raise ValueError(
            f"{name}: logit_soft_cap is {float(logit_soft_cap)}, but must be > 0, or None."
        )


def check_blocks(name: str, block_q, block_kv, block_heads, *, num_kv_heads: int) -> None:
    """Requires sizes of blocks, or None."""
    for what, number in (("block_q", block_q), ("block_kv", block_kv)):
        is_integer = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
        if number is not None and not (is_integer and number >= 1):
            raise ValueError(f"{name}: {what} is {number}, but must be an integer >= 1, or None.")
    is_integer = isinstance(block_heads, (int, np.integer))
    if block_heads is not None and not (is_integer and block_heads in divisors(num_kv_heads)):
        raise ValueError(
            f"{name}: block_heads is {block_heads}, but must be an integer that divides the "
            f"{num_kv_heads} KV heads, or None."
        )


def _check_number(name: str, what: str, value: Any) -> None:
    try:
        if not isinstance(value, bool | np.bool_ | str | bytes):
            float(0 if value is None else value)
            return
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"{name}: {what} is {value!r}, but must be a number that is known when the program is "
        "traced, or None."
    )


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


CAUSAL, FULL = "causal", "full"
_VECTOR = 8  # rows
# Rows of a block's matrix. On CPU, XLA multiplies 256 x 256 blocks with heads of 64 on one thread
# (65 of 125 GFLOP/s on 2 cores), 512 x 512 on all; larger blocks waste more work.
_BLOCK = 512
# Of the blocks of several heads: larger products and passes wait less often for all threads (2
# cores: 2.3 s without, 1.8 s with 4 heads, 8K tokens forward and backward).
_LOGITS = 4 * _BLOCK * _BLOCK


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """The resolved options of the passes; static."""

    scale: float
    logit_soft_cap: float | None
    block_q: int
    block_kv: int
    block_heads: int  # KV heads of a batch row whose blocks are computed together
    return_max_logits: bool = False
    kv_heads: int = 1  # of a batch row: that many matrices in turn have the same ranges
    # Of calls on whole arrays.
    dense: str | None = None  # all ranges are those of one document: CAUSAL or FULL
    out_dtype: Any = None
    gradient_dtypes: tuple[Any, ...] = ()  # of q, k and v


def pass_options(
    q,
    k,
    *,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    block_heads: int | None = None,
    **others: Any,
) -> PassOptions:
    """Returns checked options; the shapes of q and k select the blocks that are None."""
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    block_q = block_q or even_block(T, max(128, _BLOCK // (N // K)))
    block_kv = block_kv or even_block(S, _BLOCK)
    logits_of_head = N // K * block_q * block_kv
    together = max(x for x in divisors(K) if x == 1 or x * logits_of_head <= _LOGITS)
    return PassOptions(
        scale=H**-0.5 if scale is None else float(scale),
        logit_soft_cap=None if logit_soft_cap is None else float(logit_soft_cap),
        block_q=block_q,
        block_kv=block_kv,
        block_heads=int(block_heads or together),
        kv_heads=K,
        **others,
    )


def rank_blocks(num_queries, num_keys, num_heads, num_groups, *, rows) -> dict[str, int]:
    """Returns block sizes for ranks that compute at the same time.

    Together they keep all cores busy, so a product need not use several threads. Small blocks of
    one head stay in the caches and follow the ranges closely. `rows` is the row count of a query
    block's matrix.
    """
    block_q = max(64, rows * num_groups // max(1, num_heads))
    return {
        "block_q": even_block(num_queries, block_q),
        "block_kv": even_block(num_keys, 128),
        "block_heads": 1,
    }


def even_block(length: int, block: int) -> int:
    """Returns a size near `block`, in whole vectors, that covers the length with least waste.

    The largest of several candidates; for a short axis its length, rounded up.
    """
    if length <= block * 3 // 2:
        return max(1, -(-length // _VECTOR)) * _VECTOR
    sizes = range(block * 3 // 4 // _VECTOR * _VECTOR, block * 5 // 4 + 1, _VECTOR)
    return min(sizes, key=lambda size: (-length % size, -size))
