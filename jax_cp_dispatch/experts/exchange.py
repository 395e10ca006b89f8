"""The two exchanges of one rank: tokens to the ranks of their experts, sums of rows back.

On CPU, each token is sent from where it is. Elsewhere a rank first collects the tokens for each
rank, which then are one piece: XLA's `ragged_all_to_all` sends pieces, and few of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jax_cp_dispatch._dispatch import move, outgoing, returning
from jax_cp_dispatch._ranks.communicator import rank_index
from jax_cp_dispatch._ranks.implementations import IMPLEMENTATIONS
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.comm_gemm import Quantized, ScalingMode, dequantize, quantize
from jax_cp_dispatch.experts.routing import Routing
from jax_cp_dispatch.experts.rows import Places, expand, weighted_sum


def send_tokens(
    options: CollectiveOptions, routing: Routing, arrays: list[Shaped[Array, "T ..."]]
) -> tuple[list[Shaped[Array, "R ..."]], Places]:
    """Sends tokens once to each of their ranks, with the rows of their choices there."""
    return _send(options, routing, arrays)


def return_sums(
    options: CollectiveOptions, routing: Routing, sums: list[Float[Array, "R ..."]]
) -> list[Float[Array, "T ..."]]:
    """Returns the sums of each token from all of its ranks, and adds them up."""
    return _return(options, routing, sums)


def send_in_8_bits(
    options: CollectiveOptions, routing: Routing, arrays: list[Float[Array, "T D"]]
) -> list[Float[Array, "M D"]]:
    """Sends tokens in MXFP8, to the rows of their experts; gradients return whole."""
    return _send_narrow(options, routing, arrays)


def _send_tokens(options, routing, arrays):
    before = []
    if routing.overflow == "error":  # first, so that its error names the rows that a rank needs
        row = vary_alike([jnp.ones(1, jnp.uint8), routing.row])[0]
        capacity = routing.capacity
        before.append(outgoing(options.op, "x", row, routing.announced, capacity=capacity))
    # Plus one, so that a row that no rank writes is none.
    *received, row = _sent(options, routing, [*arrays, routing.row + 1], before)
    row = row - 1 - rank_index(options.axis_names) * routing.capacity
    return received, Places.of_rows(row, routing.capacity)


def _sent(
    options: CollectiveOptions, routing: Routing, arrays: list[Array], before: Any = ()
) -> list[Array]:
    """Sends tokens; `before` are other parts of the exchange."""
    # A rank receives each token at most once, and has a row for it.
    capacity = max(1, min(routing.capacity, routing.world_size * len(routing.row)))

    def sent(arrays: Any, plan: Any) -> list[Array]:
        part = outgoing(options.op, "x", arrays, plan, capacity=capacity)
        return move(options, [*before, part])[-1]

    def by_rank(arrays):
        collected = _collected(routing)
        return sent([expand(x, collected) for x in arrays], routing.by_rank)

    by_token = lambda arrays: sent(arrays, routing.by_token)
    return _where_it_runs(options, by_token, by_rank, arrays)


def _return_sums(options, routing, sums):
    def returned(sums: Any, plan: Any, num_rows: int) -> list[Array]:
        return move(options, [returning(options.op, "y", sums, plan, num_tokens=num_rows)])[0]

    by_token = lambda sums: returned(sums, routing.by_token, len(routing.row))

    def by_rank(sums):
        collected = _collected(routing)
        rows = returned(sums, routing.by_rank, len(collected.choice))
        return [weighted_sum(x, None, collected) for x in rows]

    return _where_it_runs(options, by_token, by_rank, sums)


def _collected(routing: Routing) -> Places:
    """Returns the rows of this rank's tokens where those for one rank are one piece."""
    num_tokens, num_choices = routing.dst_rank.shape
    return Places.of_rows(routing.send_row, num_tokens * min(num_choices, routing.world_size))


def _where_it_runs(
    options: CollectiveOptions, by_token: Callable[..., Any], by_rank: Callable[..., Any], x: Any
) -> Any:
    if options.implementation is None:
        return lax.platform_dependent(x, cpu=by_token, default=by_rank)
    is_cpu = IMPLEMENTATIONS[options.implementation].platform == "cpu"
    return by_token(x) if is_cpu else by_rank(x)


# ---- Each is the transpose of the other.


def _transposed(options: CollectiveOptions) -> CollectiveOptions:
    op, prefix = options.op, "the transpose of "
    op = op.removeprefix(prefix) if op.startswith(prefix) else prefix + op
    return dataclasses.replace(options, op=op)


def _send_backward(options, routing, gradients):
    received, _ = gradients
    is_real = [x.dtype != jax.dtypes.float0 for x in received]
    real = [x for x, keep in zip(received, is_real, strict=True) if keep]
    sums = iter(return_sums(_transposed(options), routing, real) if real else [])
    return None, [next(sums) if keep else None for keep in is_real]


def _return_backward(options, routing, gradients):
    return None, _sent(_transposed(options), routing, gradients)


_send: Any = jax.custom_vjp(_send_tokens, nondiff_argnums=(0,))
_return: Any = jax.custom_vjp(_return_sums, nondiff_argnums=(0,))
_send.defvjp(lambda *x: (send_tokens(*x), x[1]), _send_backward)
_return.defvjp(lambda *x: (return_sums(*x), x[1]), _return_backward)


def _forward_in_8_bits(options, routing, arrays):
    narrow = [quantize(x, ScalingMode.MXFP8_1D_SCALING) for x in arrays]
    leaves, tree = jax.tree.flatten(narrow)
    received, places = send_tokens(options, routing, leaves)
    rows: list[Quantized] = tree.unflatten([expand(x, places) for x in received])
    wide = [dequantize(q, x.dtype) for q, x in zip(rows, arrays, strict=True)]
    return wide, (routing, places)


def _backward_in_8_bits(options, residuals, gradients):
    routing, places = residuals
    sums = [weighted_sum(g, None, places) for g in gradients]
    return None, return_sums(_transposed(options), routing, sums)


_send_narrow: Any = jax.custom_vjp(lambda *x: _forward_in_8_bits(*x)[0], nondiff_argnums=(0,))
_send_narrow.defvjp(_forward_in_8_bits, _backward_in_8_bits)
