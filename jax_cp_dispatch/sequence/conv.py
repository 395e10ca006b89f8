"""`causal_conv`: the short depthwise convolution of hybrid models, within documents."""

from __future__ import annotations

from collections.abc import Sequence as Names

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.sequence.call_layer import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.halo import receive_halo
from jax_cp_dispatch.sequence.pieces import Options, Pieces
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
) -> Float[Array, "B T C"]:
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
    Returns:
      The convolution, in the shape and dtype of x.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, implementation, deadline)
    _check(x, weight, bias)
    weights = (weight,) if bias is None else (weight, bias)
    where, axes = Where(documents, segment_ids, positions), Axes(mesh, batch_axis, head_axis)
    layer = Layer(options, _convolve, moves=len(weight) > 1)
    return call_layer(layer, x, weights, where, axes)


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
def _convolve(options: Options, pieces: Pieces, x: Array, weights: tuple[Array, ...]) -> Array:
    """Computes the convolution of one rank's rows [B, T, C]."""
    weight, *bias = weights
    width, dtype = weight.shape[0] - 1, x.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    rows, offset = pieces.arrange(x), pieces.offsets()
    total = jnp.zeros(rows.shape, wide)
    for back in range(width + 1):  # the token `back` before
        here = jnp.pad(rows, ((0, 0), (back, 0), (0, 0)))[:, : rows.shape[1]]
        here = jnp.where((offset >= back)[..., None], here.astype(wide), 0)
        total += here * weight[width - back].astype(wide)
    if width and pieces.world_size > 1:
        total = _add_halo(options, pieces, rows, weight.astype(wide), total)
    for x in bias:
        total += x.astype(wide)
    out = jnp.where(pieces.is_token[..., None], total, 0).astype(dtype)
    return pieces.restore(out)


def _add_halo(options, pieces, rows, weight, total):
    """Adds what the tokens before a cut contribute to the first rows after it."""
    width, size = weight.shape[0] - 1, pieces.begin.size
    flat = jax.lax.collapse(rows, 0, 2)
    before = receive_halo(options.exchange, pieces, flat, width)  # [P, width, C]
    padded = jnp.pad(before.astype(total.dtype), ((0, 0), (0, width), (0, 0)))
    # Row i of a piece takes tokens i, ..., i + W - 1 of (before, piece); those of the piece are in
    # `total` already.
    added = sum(padded[:, i : i + width] * weight[i] for i in range(width))
    own, index = pieces.own_later, jnp.arange(width, dtype=jnp.int32)
    reaches = own.used[:, None] & (index < own.length[:, None])
    at = jnp.where(reaches, own.row[:, None] + index, size)
    total = jax.lax.collapse(total, 0, 2).at[at].add(added, mode="drop")
    return total.reshape(rows.shape)
