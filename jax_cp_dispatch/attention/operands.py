"""`Operands` and `Outputs`: the arrays that the algorithms take and return, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.attention.local.backward import SoftmaxGradients
from jax_cp_dispatch.attention.local.blocks import accumulator
from jax_cp_dispatch.attention.local.check_operands import check_arrays, check_operands
from jax_cp_dispatch.attention.local.derivative_order import (
    forbid_second_derivative,
    in_reverse_only,
)
from jax_cp_dispatch.attention.local.sink import check_sink
from jax_cp_dispatch.documents.segment_ids import check_documents


class Operands(NamedTuple):
    """What attention reads.

    Attributes:
      q, k, v: queries, keys and values. With an expansion, k are the arrays of latent rows,
        `[B, T, 1, F]` each, and v is None.
      sink: a logit `[N]` for each query head, or None.
      weights: of the expansion, or None.
    """

    q: Any
    k: Any
    v: Any
    sink: Any = None
    weights: Any = None

    @property
    def moved(self) -> tuple[Any, ...]:
        """What moves to the queries: keys and values, or latent rows."""
        return self.k if self.v is None else (self.k, self.v)

    def varying(self, exchange: CollectiveOptions) -> Operands:
        """Returns arrays that vary over the ranks and are differentiable in reverse mode only.

        A sink and weights are the same on all ranks: their gradients are summed over them, in
        float32, and those of latent rows over ranks of other heads.
        """
        wide = self._replace(sink=_widened(self.sink), weights=_widened(self.weights))
        if self.v is None:
            wide = wide._replace(k=_widened(self.k))
        wide = map_floats(lambda arrays: in_reverse_only(exchange.op, arrays), wide)
        leaves, tree = jax.tree.flatten(wide)
        varying: Operands = tree.unflatten(vary_alike(leaves, also=exchange.axis_names))
        narrow = lambda x, like: x.astype(like.dtype)
        k = jax.tree.map(narrow, varying.k, self.k)
        return varying._replace(k=k, weights=jax.tree.map(narrow, varying.weights, self.weights))

    def derived_once(self, op: str) -> Operands:
        """Returns the same for the rules of a derivative, which is not differentiable itself."""
        return map_floats(lambda arrays: forbid_second_derivative(op, arrays), self)


class Outputs(NamedTuple):
    """What attention returns; None for what the caller did not ask for.

    Attributes:
      out: `[B, T, N, Hv]`.
      lse: `[B, T, N]`; -inf for rows without keys.
      max_logits: `[N]`, of all ranks.
    """

    out: Any
    lse: Any = None
    max_logits: Any = None


def is_float(x: Any) -> bool:
    """Whether an array has a derivative."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def map_floats(change: Callable[[list[Any]], list[Any]], tree: Any) -> Any:
    """Changes the differentiable arrays of a pytree."""
    leaves, structure = jax.tree.flatten(tree)
    changed = iter(change([x for x in leaves if is_float(x)]))
    return structure.unflatten([next(changed) if is_float(x) else x for x in leaves])


def rounded(gradients: Any, arrays: Any) -> tuple[Any, ...]:
    """Returns the gradients of arrays in their dtypes; None for those without derivative."""
    pairs = zip(gradients, arrays, strict=True)
    return tuple(None if x is None else x.astype(like.dtype) for x, like in pairs)


def _widened(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)) if is_float(x) else x, tree)


def softmax_gradients(op: str, out: Any, lse: Any, cotangents: Outputs) -> SoftmaxGradients:
    """Returns the whole softmax, lse `[B, N, T]`, and its cotangents, those of `Outputs`."""
    dout, dlse, _ = cotangents
    if dlse is None:
        return SoftmaxGradients(out, lse, *forbid_second_derivative(op, [dout]))
    dout, dlse = forbid_second_derivative(op, [dout, dlse])
    return SoftmaxGradients(out, lse, dout, jnp.swapaxes(dlse, 1, 2))


def has_no_tokens(operands: Operands) -> bool:
    return 0 in operands.q.shape[:2]


def empty_outputs(operands: Operands, v: Any, return_lse: bool, return_max_logits: bool) -> Outputs:
    """Returns the outputs of no tokens, whose values have the shape of `v`."""
    q = operands.q
    B, T, N, _ = q.shape
    dtype = accumulator(q)
    lse = jnp.full((B, T, N), -jnp.inf, dtype) if return_lse else None
    max_logits = jnp.full(N, -jnp.inf, dtype) if return_max_logits else None
    return Outputs(jnp.zeros((B, T, N, v.shape[3]), q.dtype), lse, max_logits)


def check_rows(op: str, operands: Operands, segment_ids: Any, positions: Any) -> None:
    """Requires that arrays of one rank, or of all ranks, match."""
    q, k, v, sink, _ = operands
    if v is not None:  # not latent rows, which `read_operands` checks
        _check_qkv(op, q, k, v)
    check_sink(op, sink, q.shape[2])
    check_documents(op, segment_ids, positions, q.shape[:2], "q has B, T =")


def _check_qkv(op: str, q: Any, k: Any, v: Any) -> None:
    check_arrays(op, q=q, k=k, v=v)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(
            f"{op}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; they need "
            "[B, T, heads, features] with equal B and T. For queries and keys of "
            "different lengths, use local_attention on one device."
        )
    check_operands(op, q, k, v)
