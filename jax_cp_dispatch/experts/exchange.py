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
from jaxtyping import Array, Inexact, Shaped

from jax_cp_dispatch._dispatch import Argument, move, outgoing, returning
from jax_cp_dispatch._ranks.communicator import rank_index
from jax_cp_dispatch._ranks.implementations import IMPLEMENTATIONS
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.comm_gemm import ScalingMode, dequantize, quantize
from jax_cp_dispatch.experts.routing import Routing
from jax_cp_dispatch.experts.rows import Places, expand, weighted_sum


def send_tokens(
    options: CollectiveOptions, routing: Routing, arrays: list[Shaped[Array, "T ..."]]
) -> tuple[list[Shaped[Array, "R ..."]], Places]:
    """Sends tokens once to each of their ranks, with the rows of their choices there."""
    return _send(options, routing, arrays)


def return_sums(
    options: CollectiveOptions, routing: Routing, sums: list[Inexact[Array, "R ..."]]
) -> list[Inexact[Array, "T ..."]]:
    """Returns the sums of each token from all of its ranks, and adds them up."""
    return _return(options, routing, sums)


def send_to_rows(
    options: CollectiveOptions,
    mode: ScalingMode,
    routing: Routing,
    arrays: list[Shaped[Array, "T ..."]],
) -> list[Shaped[Array, "M ..."]]:
    """Sends tokens to the rows of their experts, also in 8 bits; gradients return as they are."""
    return _send_to_rows(options, mode, routing, arrays)


def _send_tokens(options, routing, arrays):
    # Plus one, so that a row that no rank writes is none.
    *received, row = _sent(options, routing, [*arrays, routing.row + 1])
    return received, _places(options, routing, row)


def _move(options: CollectiveOptions, routing: Routing, parts: list[Argument]) -> list[Any]:
    """Makes one exchange. Errors then speak of experts; see csrc/dispatch/messages.h."""
    name = f"experts:{routing.capacity}"
    return move(options, [part._replace(capacity_name=name) for part in parts])


def _most_tokens(routing: Routing) -> int:
    """A rank receives each token at most once, and has a row for it."""
    return max(1, min(routing.capacity, routing.world_size * len(routing.row)))


def _places(options: CollectiveOptions, routing: Routing, row: Array) -> Places:
    """Reads the rows that came with the tokens."""
    first = 1 + rank_index(options.axis_names) * routing.capacity
    return Places.of_rows(row - first, routing.capacity)


def _rows_and_places(options, routing, arrays, with_places):
    """Sends tokens to their rows. On CPU, where each is read from where it is, in one copy."""

    def by_choice(arrays):
        op, capacity = options.op, routing.capacity
        parts = [outgoing(op, "x", arrays, routing.by_choice, capacity=capacity)]
        if with_places:
            row = vary_alike([routing.row + 1, *arrays])[0]
            parts.append(outgoing(op, "row", row, routing.by_token, capacity=_most_tokens(routing)))
        rows, *row = _move(options, routing, parts)
        return rows, _places(options, routing, row[0]) if with_places else None

    def by_rank(arrays):
        received, places = _send_tokens(options, routing, arrays)
        rows = [_only_if_valid(expand(x, places), routing) for x in received]
        return rows, places if with_places else None

    return _where_it_runs(options, by_choice, by_rank, arrays)


def _sent(options: CollectiveOptions, routing: Routing, arrays: list[Array]) -> list[Array]:
    def sent(arrays: Any, plan: Any) -> list[Array]:
        part = outgoing(options.op, "x", arrays, plan, capacity=_most_tokens(routing))
        return _move(options, routing, [part])[0]

    def by_rank(arrays):
        collected = _collected(routing)
        return sent([expand(x, collected) for x in arrays], routing.by_rank)

    by_token = lambda arrays: sent(arrays, routing.by_token)
    return _where_it_runs(options, by_token, by_rank, arrays)


def _return_sums(options, routing, sums):
    def returned(sums: Any, plan: Any, num_rows: int) -> list[Array]:
        part = returning(options.op, "y", sums, plan, num_tokens=num_rows)
        return _move(options, routing, [part])[0]

    by_token = lambda sums: returned(sums, routing.by_token, len(routing.row))

    def by_rank(sums):
        collected = _collected(routing)
        rows = returned(sums, routing.by_rank, len(collected.choice))
        return [_only_if_valid(weighted_sum(x, None, collected), routing) for x in rows]

    return _where_it_runs(options, by_token, by_rank, sums)


def _only_if_valid(rows: Array, routing: Routing) -> Array:
    """XLA's collectives raise no error: NaN, and zeros of integers."""
    wrong = jnp.nan if jnp.issubdtype(rows.dtype, jnp.inexact) else 0
    return jnp.where(routing.is_valid[0], rows, jnp.asarray(wrong, rows.dtype))


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
    return None, _sums_of_tokens(options, routing, received)


def _sums_of_tokens(options: CollectiveOptions, routing: Routing, gradients: Any) -> list[Any]:
    """Returns the gradients of arrays that were sent; integers have none."""
    real = [x for x in gradients if x.dtype != jax.dtypes.float0]
    sums = iter(return_sums(_transposed(options), routing, real) if real else [])
    return [None if x.dtype == jax.dtypes.float0 else next(sums) for x in gradients]


def _return_backward(options, routing, gradients):
    return None, _sent(_transposed(options), routing, gradients)


_send: Any = jax.custom_vjp(_send_tokens, nondiff_argnums=(0,))
_return: Any = jax.custom_vjp(_return_sums, nondiff_argnums=(0,))
_send.defvjp(lambda *x: (send_tokens(*x), x[1]), _send_backward)
_return.defvjp(lambda *x: (return_sums(*x), x[1]), _return_backward)


def _to_rows(options, mode, routing, arrays, with_places=False):
    is_narrow = mode == ScalingMode.MXFP8_1D_SCALING
    leaves, tree = jax.tree.flatten([quantize(x, mode) for x in arrays] if is_narrow else arrays)
    rows, places = _rows_and_places(options, routing, leaves, with_places)
    rows = tree.unflatten(rows)
    if is_narrow:
        rows = [dequantize(row, x.dtype) for row, x in zip(rows, arrays, strict=True)]
    return rows, (routing, places)


def _to_rows_backward(options, mode, residuals, gradients):
    routing, places = residuals
    is_none = lambda x: x.dtype == jax.dtypes.float0
    sums = [g if is_none(g) else weighted_sum(g, None, places) for g in gradients]
    return None, _sums_of_tokens(options, routing, sums)


_send_to_rows: Any = jax.custom_vjp(lambda *x: _to_rows(*x)[0], nondiff_argnums=(0, 1))
_send_to_rows.defvjp(lambda *x: _to_rows(*x, with_places=True), _to_rows_backward)
