"""`causal_conv`: the short depthwise convolution of hybrid models, within documents."""

from __future__ import annotations

from collections.abc import Sequence as Names
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int32, Integer

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._arrays import only_where, sum_dtype
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.sequence.call_layer import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.carried import Carried, check_state, last_rows
from jax_cp_dispatch.sequence.halo import receive_halo
from jax_cp_dispatch.sequence.pieces import Cuts, Options, Pieces
from jax_cp_dispatch.sequence.recurrence import check_floats

_OP = "causal_conv"


def causal_conv(
    x: Float[HostOrDevice, "B T C"],
    weight: Float[HostOrDevice, "W C"],
    bias: Float[HostOrDevice, " C"] | None = None,
    *,
    axis_name: AxisName,
    documents: Documents | Pieces | None = None,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    initial_state: Float[HostOrDevice, "B V C"] | None = None,
    return_state: bool = False,
) -> Float[Array, "B T C"] | Any:
    """Computes a depthwise convolution over the tokens of each document, of this and earlier ones.

        y[t] = bias + sum_i weight[i] * x[t - (W - 1) + i]

    Tokens before the document are zero. Call inside `jax.shard_map` over `axis_name`, on every
    rank, or on global arrays. Differentiable. For each cut of a document, W - 1 rows move, in one
    exchange; its derivative is another. The sum accumulates in float32 and is rounded once. Padding
    is not read and its output is zero.

    Args:
      x: tokens, C channels.
      weight: of W taps; the last is that of the token itself. The same on all ranks.
      bias: added to each token.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      documents: what the tokens are, and their order, in which the arrays are; or, inside
        `jax.shard_map`, the `document_pieces` of them. A plan of another batch is an error.
      segment_ids, positions: the short form for packed order, see `context_parallel_attention`;
        without it, each batch row is one document.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`; `head_axis`
        shards C.
      implementation, deadline: of the exchange, see `dispatch`.
      initial_state: for documents that continue: the V = W - 1 tokens before the first document of
        each batch row, the same on all ranks; zeros in a row that begins a document. Only in packed
        order.
      return_state: also return the last W - 1 tokens of the last document of each batch row, for
        the next call. Padding does not count; a row without tokens keeps its state.
    Returns:
      The convolution, in the shape and dtype of x; or (convolution, state), the state in x's dtype,
      on all ranks.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, implementation, deadline)
    _check(x, weight, bias)
    weights = (weight,) if bias is None else (weight, bias)
    shape = x.shape[0], len(weight) - 1, x.shape[2]
    like = jax.ShapeDtypeStruct(shape, x.dtype)
    check_state(_OP, initial_state, like, "Pass the last tokens of each running document.")
    where, axes = Where(documents, segment_ids, positions), Axes(mesh, batch_axis, head_axis)
    layer = Layer(options, _convolve, moves=len(weight) > 1)
    carried = Carried(initial_state, return_state, head_axis=2)
    return call_layer(layer, x, weights, where, axes, carried)


def _check(x, weight, bias) -> None:
    check_floats(_OP, x=x, weight=weight, bias=bias)
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != x.shape[2]:
        raise ValueError(
            f"{_OP}: x has shape {x.shape} and weight {weight.shape}; they need [B, T, C] and "
            "[W, C], with the same C. Pass one weight for each tap and channel."
        )
    if bias is not None and bias.shape != x.shape[2:]:
        raise ValueError(
            f"{_OP}: bias has shape {bias.shape} but x has {x.shape[2]} channels. Pass one value "
            "for each channel."
        )


@jax.named_scope("cpd.causal_conv")
def _convolve(
    options: Options, pieces: Pieces, x: Array, weights: tuple[Array, ...], carried: Carried
) -> tuple[Array, Array | None]:
    """Computes the convolution of one rank's rows [B, T, C]."""
    weight, *bias = weights
    width, dtype = weight.shape[0] - 1, x.dtype
    wide = sum_dtype(dtype)
    rows, offset = pieces.arrange(x), pieces.offsets()
    total = jnp.zeros(rows.shape, wide)
    for back in range(width + 1):  # the token `back` before
        here = jnp.pad(rows, ((0, 0), (back, 0), (0, 0)))[:, : rows.shape[1]]
        here = jnp.where((offset >= back)[..., None], here.astype(wide), 0)
        total += here * weight[width - back][None, None].astype(wide)
    flat = jax.lax.collapse(rows, 0, 2)
    if width and pieces.world_size > 1:
        before = receive_halo(options.exchange, pieces, flat, width)
        total = _add_before(total, pieces.own_later, before, weight.astype(wide))
    initial = carried.initial
    if width and initial is not None:
        piece = pieces.row_ends.first_piece(pieces)
        before = _from(initial, piece.start)
        total = _add_before(total, piece, before, weight.astype(wide))
    for x in bias:
        total += x[None, None].astype(wide)
    out = jnp.where(pieces.is_token[..., None], total, 0).astype(dtype)
    state = last_rows(pieces, flat, width, initial) if carried.is_returned else None
    return pieces.restore(out), state


def _from(state: Float[Array, "B V C"], start: Int32[Array, " B"]) -> Float[Array, "B V C"]:
    """Returns the state's tokens behind the first `start`, and zeros for tokens of this call."""
    place = jnp.arange(state.shape[1], dtype=jnp.int32)[None] + start[:, None]
    inside = place < state.shape[1]
    place = jnp.where(inside, place, 0)[..., None]
    return only_where(inside, jnp.take_along_axis(state, place, axis=1))


def _add_before(
    total: Float[Array, "G L C"],
    own: Cuts,
    before: Float[Array, "P V C"],
    weight: Float[Array, "W C"],
) -> Float[Array, "G L C"]:
    """Adds what the tokens before pieces contribute to their first rows."""
    width, shape = weight.shape[0] - 1, total.shape
    size = shape[0] * shape[1]
    padded = jnp.pad(before.astype(total.dtype), ((0, 0), (0, width), (0, 0)))
    # Row i of a piece takes tokens i, ..., i + W - 1 of (before, piece); those of the piece are in
    # `total` already.
    added = sum(padded[:, i : i + width] * weight[i][None, None] for i in range(width))
    index = jnp.arange(width, dtype=jnp.int32)[None]
    reaches = own.used[:, None] & (index < own.length[:, None])
    at = jnp.where(reaches, own.row[:, None] + index, size)
    total = jax.lax.collapse(total, 0, 2).at[at].add(added, mode="drop")
    return total.reshape(shape)
