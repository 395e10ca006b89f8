"""Checks the arrays of recurrences, and widens them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def check_heads(op: str, q: Any, k: Any, v: Any, log_decay: Any, beta: Any = None) -> None:
    """Requires queries, keys and values of matching heads, with their decays."""
    if q.ndim != 4 or v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{op}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; they need [B, T, K, H], "
            "[B, T, K, H] and [B, T, N, Hv]. Pass heads as axis 2."
        )
    if not q.shape[2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"{op}: v has {v.shape[2]} heads but k has {q.shape[2]}, which must divide them. Pass "
            "one key head for each group of value heads."
        )
    heads = v.shape[:3]
    if log_decay.shape not in (heads, (*heads, q.shape[3])):
        raise ValueError(
            f"{op}: log_decay has shape {log_decay.shape}; it needs {heads} (per head) or "
            f"{(*heads, q.shape[3])} (per channel). Pass one of these."
        )
    if beta is not None and beta.shape != heads:
        raise ValueError(
            f"{op}: beta has shape {beta.shape}; it needs {heads}. Pass one number per head."
        )


def check_elementwise(op: str, x: Any, log_decay: Any) -> None:
    if x.ndim < 2 or x.shape != log_decay.shape:
        raise ValueError(
            f"{op}: x has shape {x.shape} and log_decay {log_decay.shape}; they need to be equal, "
            "[B, T, ...]. Pass jnp.broadcast_to(log_decay, x.shape)."
        )


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns arrays in float32, or float64 if one has it."""
    dtype = jnp.result_type(jnp.float32, *(x.dtype for x in inputs.values()))
    return {name: x.astype(dtype) for name, x in inputs.items()}
