"""Checks the arrays of recurrences, and widens them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_cp_dispatch._arguments import check_array


def check_floats(op: str, **arrays: Any) -> None:
    """Requires arrays of floats; those that are None are not given."""
    for name, x in arrays.items():
        if x is None:
            continue
        check_array(op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{op}: {name} has dtype {x.dtype}; it needs to be floats. Cast it.")


def check_rows(op: str, name: str, tree: Any) -> None:
    """Requires arrays [B, T, ...] of equal B and T, at least one."""
    leaves = jax.tree.leaves(tree)
    for x in leaves:
        check_array(op, name, x)
    if not leaves or any(x.ndim < 2 or x.shape[:2] != leaves[0].shape[:2] for x in leaves):
        raise ValueError(
            f"{op}: {name} has arrays of shapes {[x.shape for x in leaves]}; they need "
            "[B, T, ...] with equal B and T. Pass at least one such array."
        )


def check_heads(op: str, q: Any, k: Any, v: Any, log_decay: Any, beta: Any = None) -> None:
    """Requires queries, keys and values of matching heads, with their decays."""
    check_floats(op, q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    if q.ndim != 4 or v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{op}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; they need [B, T, K, H], "
            "[B, T, K, H] and [B, T, N, Hv]. Pass heads as axis 2."
        )
    if not q.shape[2] or not v.shape[2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"{op}: v has {v.shape[2]} heads but k has {q.shape[2]}, which must divide them. Pass "
            "one key head for each group of value heads, at least one."
        )
    if not q.shape[3]:
        raise ValueError(
            f"{op}: heads of q and k have size 0; they need at least one feature. Pass those of a "
            "state with rows."
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
    check_floats(op, x=x, log_decay=log_decay)
    if x.ndim < 2 or x.shape != log_decay.shape:
        raise ValueError(
            f"{op}: x has shape {x.shape} and log_decay {log_decay.shape}; they need to be equal, "
            "[B, T, ...]. Pass jnp.broadcast_to(log_decay, x.shape)."
        )


def wide_dtype(inputs: dict[str, Any]) -> Any:
    """Returns the dtype in which arrays are computed: float32, or float64 if one has it."""
    return jnp.result_type(jnp.float32, *(x.dtype for x in inputs.values()))


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """Widens the arrays."""
    dtype = wide_dtype(inputs)
    return {name: x.astype(dtype) for name, x in inputs.items()}


def heads_first(rows: dict[str, Array], scale: float) -> list[Float[Array, "n G N C F"]]:
    """Returns scaled q, k, v, log decay and, if given, beta of rows in chunks [n, G, C, N, ...].

    Each head has queries and keys of its own. Log decays are finite: instead of -inf, a number
    whose exponential is zero, so that no product with it is NaN.
    """
    rows = wide(rows)
    q, k, v, log = (rows[name] for name in ("q", "k", "v", "log_decay"))
    q, k = (jnp.repeat(x, v.shape[3] // k.shape[3], axis=3) for x in (q * scale, k))
    log = jnp.maximum(log, -120.0 if log.dtype == jnp.float32 else -800.0)
    per_head = [log, *([rows["beta"]] if "beta" in rows else [])]
    log, *beta = (x if x.ndim == 5 else x[..., None] for x in per_head)
    return [x.swapaxes(2, 3) for x in (q, k, v, log, *beta)]
