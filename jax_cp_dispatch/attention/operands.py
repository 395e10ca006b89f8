"""`Operands` and `Outputs`: the arrays that the algorithms take and return."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_cp_dispatch._dtypes import sum_dtype
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.attention.local.backward import SoftmaxGradients
from jax_cp_dispatch.attention.local.derivative_order import (
    forbid_second_derivative,
    in_reverse_only,
)
from jax_cp_dispatch.attention.local.sink import check_sink


class Operands(NamedTuple):
    """What attention reads.

    Attributes:
      q, k, v: queries, keys and values.
      sink: a logit `[N]` for each query head, or None.
    """

    q: Any
    k: Any
    v: Any
    sink: Any = None

    def varying(self, exchange: CollectiveOptions) -> Operands:
        """Returns arrays that vary over the ranks and are differentiable in reverse mode only.

        A sink is the same on all ranks: its gradients are summed over them, in float32.
        """
        q, k, v, sink = self
        check_sink(exchange.op, sink, q.shape[2])
        sinks = [] if sink is None else [sink.astype(sum_dtype(sink.dtype))]
        arrays = in_reverse_only(exchange.op, [q, k, v, *sinks])
        return Operands(*vary_alike(arrays, also=exchange.axis_names))


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


def softmax_gradients(op: str, out: Any, lse: Any, cotangents: Outputs) -> SoftmaxGradients:
    """Returns the whole softmax, lse `[B, N, T]`, and its cotangents, those of `Outputs`."""
    dout, dlse, _ = cotangents
    if dlse is None:
        return SoftmaxGradients(out, lse, *forbid_second_derivative(op, [dout]))
    dout, dlse = forbid_second_derivative(op, [dout, dlse])
    return SoftmaxGradients(out, lse, dout, jnp.swapaxes(dlse, 1, 2))
