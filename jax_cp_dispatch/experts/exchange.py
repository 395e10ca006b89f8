"""The two exchanges of one rank: tokens to the ranks of their experts, sums of rows back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jax_cp_dispatch._dispatch import move, outgoing, returning
from jax_cp_dispatch._ranks.communicator import rank_index
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.comm_gemm import Quantized, ScalingMode, dequantize, quantize
from jax_cp_dispatch.experts.routing import Routing
from jax_cp_dispatch.experts.rows import Places, expand, weighted_sum


def send_tokens(
    options: CollectiveOptions, routing: Routing, arrays: Sequence[Shaped[Array, "T ..."]]
) -> tuple[list[Shaped[Array, "R ..."]], Places]:
    """Sends tokens once to each of their ranks, with the rows of their choices there."""
    capacity = routing.capacity
    # A rank receives each token at most once, and has a row for it.
    num_received = max(1, min(capacity, routing.world_size * len(routing.row)))
    sent = [*arrays, routing.row + 1]  # so that a row that no rank writes is none
    parts = [outgoing(options.op, "x", sent, routing.metadata, capacity=num_received)]
    if routing.overflow == "error":  # first, so that its error names the rows that a rank needs
        row = vary_alike([jnp.ones(1, jnp.uint8), routing.row])[0]
        parts.insert(0, outgoing(options.op, "x", row, routing.announced, capacity=capacity))
    *received, row = move(options, parts)[-1]
    rank = rank_index(options.axis_names)
    return received, Places.of_rows(row - 1 - rank * capacity, capacity)


def return_sums(
    options: CollectiveOptions, routing: Routing, sums: Sequence[Float[Array, "R ..."]]
) -> list[Float[Array, "T ..."]]:
    """Returns the sums of each token from all of its ranks, and adds them up."""
    num_tokens = len(routing.row)
    part = returning(options.op, "y", list(sums), routing.metadata, num_tokens=num_tokens)
    return move(options, [part])[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def send_in_8_bits(
    options: CollectiveOptions, routing: Routing, arrays: list[Float[Array, "T D"]]
) -> list[Float[Array, "M D"]]:
    """Sends tokens in MXFP8, to the rows of their experts; gradients return in their own dtypes."""
    return _send_in_8_bits(options, routing, arrays)[0]


def _send_in_8_bits(options, routing, arrays):
    narrow = [quantize(x, ScalingMode.MXFP8_1D_SCALING) for x in arrays]
    leaves, tree = jax.tree.flatten(narrow)
    received, places = send_tokens(options, routing, leaves)
    rows: list[Quantized] = tree.unflatten([expand(x, places) for x in received])
    wide = [dequantize(q, x.dtype) for q, x in zip(rows, arrays, strict=True)]
    return wide, (routing, places)


def _backward(options, residuals, gradients):
    routing, places = residuals
    return None, return_sums(options, routing, [weighted_sum(g, None, places) for g in gradients])


send_in_8_bits.defvjp(_send_in_8_bits, _backward)
