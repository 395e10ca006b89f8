"""Checks dtypes, shapes and options of local attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._arguments import check_array

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def check_arrays(op: str, **arrays: Any) -> None:
    """Requires arrays of JAX or NumPy; optional ones may be None."""
    for name, x in arrays.items():
        if x is not None or name != "dlse":
            check_array(op, name, x)


def check_operands(name: str, q: Any, k: Any, v: Any) -> None:
    """Requires matching dtypes and shapes of queries, keys and values."""
    check_arrays(name, q=q, k=k, v=v)
    if q.dtype not in _FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"{name}: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}, but must have "
            "the same one: bfloat16, float16, float32 or float64. Cast them."
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
                f"{name}: heads of {heads} have size 0; they need at least one feature."
            )


def check_result_dtype(name: str, what: str, asked: Any, dtypes: tuple[Any, Any]) -> Any:
    """Returns the dtype that is asked for: that of the operands, or by default that of sums."""
    of_operands, of_sums = map(jnp.dtype, dtypes)
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
