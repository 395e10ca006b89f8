"""Attention over the ranks for this rank's rows of a sequence, in every layout."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jax_cp_dispatch._arrays import known_inside, only_where
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch._scans import are_covered
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.latents import key_shapes
from jax_cp_dispatch.attention.local.local_options import LocalOptions, rank_blocks
from jax_cp_dispatch.attention.local.query_ranges import KeyQueries
from jax_cp_dispatch.attention.local.rows import with_rows
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.attention.rotating.attend import Rotation, TokenRanges, attend_rotating
from jax_cp_dispatch.attention.rotating.communication import move_chunks, reverse
from jax_cp_dispatch.attention.rotating.key_chunks import Chunking
from jax_cp_dispatch.attention.rotating.schedules import Schedule
from jax_cp_dispatch.documents.layouts import (
    SequenceLayout,
    contiguous_layout,
    halves_in_zigzag,
    zigzag_layout,
)
from jax_cp_dispatch.documents.ranges import PackedMask, gathered_ranges
from jax_cp_dispatch.masks import Mask, MaskRanges


@dataclasses.dataclass(frozen=True)
class ShardedSequence:
    """The layout of a sequence on the ranks, and the range to which its tokens attend; static.

    Attributes:
      options: of the call, checked.
      schedule: of the chunks of keys and values; hashable.
      zigzag: compute in zigzag layout; contiguous parts are rearranged, and the output back.
    """

    options: AttentionOptions
    schedule: Schedule
    zigzag: bool

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @property
    def rearranges(self) -> bool:
        return self.zigzag and self.options.order.layout == "contiguous" and self.num_ranks > 1

    def rotation(self, q, k, v) -> Rotation:
        """Returns the rotation of one rank's arrays, or of their shapes and dtypes."""
        (B, T, N, H), K, Hv = q.shape, k.shape[2], v.shape[3]
        layout = self._layout(T)
        held = Chunking(layout, self.schedule.num_chunks).most_tokens
        passes = LocalOptions(
            self.options.op,
            scale=self.options.scale,
            logit_soft_cap=self.options.logit_soft_cap,
            return_max_logits=self.options.return_max_logits,
            **rank_blocks(layout.num_rows, held, N, K, rows=256),
        ).resolved(q, k, v)
        shape = B, layout.num_rows, N, H
        return Rotation(
            *(self.schedule, layout, self.options.exchange, passes, shape, K, Hv),
            return_lse=self.options.return_lse,
            expansion=self.options.expansion,
        )

    def _layout(self, num_tokens: int) -> SequenceLayout:
        """The layout in which a rank's tokens are computed."""
        if self.options.order.layout == "zigzag":
            return zigzag_layout(self.num_ranks, num_tokens)
        make = halves_in_zigzag if self.rearranges else contiguous_layout
        return make(self.num_ranks, num_tokens)


@partial(jax.jit, static_argnums=0)  # equal calls of a program are traced and lowered once
def attend_sequence(
    sequence: ShardedSequence,
    operands: Operands,
    packed: PackedMask,
) -> Outputs:
    """Computes attention of this rank's rows, for all schedules."""
    options, q = sequence.options, operands.q
    B, T = q.shape[:2]
    k, v = key_shapes(options.expansion, operands)
    rotation = sequence.rotation(q, k, v)
    q, k, v, *others = operands.varying(options.exchange)
    leaves, tree = jax.tree.flatten((q, k, v))
    q, k, v = tree.unflatten(to_layout(sequence, rotation, leaves))
    ranges = token_ranges(sequence, rotation, packed, (B, T))
    leaves, tree = jax.tree.flatten((Operands(q, k, v, *others), ranges))
    outputs: Outputs = attend_rotating(rotation, *tree.unflatten(vary_alike(leaves)))
    out, lse, max_logits = outputs
    if lse is None:
        return Outputs(*from_layout(sequence, (out,), T), max_logits=max_logits)
    out, lse = from_layout(sequence, (out, lse[..., None]), T)
    return Outputs(out, lse[..., 0], max_logits)


def to_layout(sequence: ShardedSequence, rotation: Rotation, arrays):
    """Arranges this rank's rows for the rotation: padded blocks, in zigzag order if needed."""
    num_rows = rotation.layout.num_rows  # one more than there are if halves are uneven
    arrays = tuple(with_rows(x, num_rows, 1) for x in arrays)
    if sequence.rearranges:
        arrays = named_context(_to_zigzag(sequence.options.exchange, arrays))
    return arrays


def from_layout(sequence: ShardedSequence, arrays, num_tokens: int):
    """Restores the caller's layout of arrays `[B, rows, N, _]`."""
    if sequence.rearranges:
        arrays = named_context(_from_zigzag(sequence.options.exchange, arrays))
    return tuple(x[:, :num_tokens] for x in arrays)


def token_ranges(
    sequence: ShardedSequence, rotation: Rotation, packed: PackedMask, shape
) -> TokenRanges:
    """Returns the tokens that each of this rank's rows sees, in the rows of the rotation."""
    options = sequence.options
    order = {"layout": options.order.layout, "checks_order": options.checks_order}
    seen, fault = gathered_ranges(options.exchange, packed, shape, **order)
    token = rotation.layout.positions(lax.axis_index(options.exchange.axis_name))
    ranges = ranges_of_rows(packed.mask, seen, token)._replace(fault=fault)
    leaves, tree = jax.tree.flatten(ranges)
    return tree.unflatten(named_context(vary_alike(leaves, also=options.exchange.axis_names)))


def ranges_of_rows(mask: Mask, seen: MaskRanges, token: Any) -> TokenRanges:
    """Returns what the rows of `token` see, of what all tokens see; token -1 pads a block."""
    is_row = jnp.broadcast_to(token >= 0, (len(seen.k_start), *token.shape))
    of_rows = lambda x: only_where(is_row, known_inside(x, jnp.maximum(token, 0), axis=1))
    ranges = TokenRanges(of_rows(jnp.stack([seen.k_start, seen.k_end], axis=2)))
    if mask.has_arrays:
        is_key = are_covered(seen.k_start, seen.k_end, seen.k_start.shape[1])
        ranges = ranges._replace(is_key=of_rows(is_key))
    if seen.q_start is not None:
        index = jnp.broadcast_to(token, ranges.start.shape)
        ranges = ranges._replace(queries=KeyQueries(index, seen.q_start, seen.q_end))
    return ranges


def _zigzag_routes(num_ranks: int):
    """Returns the routes of halves 2 r and 2 r + 1 of the sequence from rank r to zigzag order."""
    return tuple(
        tuple(min(2 * r + half, 2 * num_ranks - 1 - (2 * r + half)) for r in range(num_ranks))
        for half in range(2)
    )


def _to_zigzag(exchange: CollectiveOptions, arrays):
    chunks = tuple(map(_halves, arrays))
    routes = _zigzag_routes(lax.axis_size(exchange.axis_name))
    moved = move_chunks(exchange, chunks, routes)
    return tuple(_rows(_swap_on_odd_ranks(exchange, x)) for x in moved)


def _from_zigzag(exchange: CollectiveOptions, arrays):
    chunks = tuple(_swap_on_odd_ranks(exchange, _halves(x)) for x in arrays)
    routes = reverse(_zigzag_routes(lax.axis_size(exchange.axis_name)))
    return tuple(map(_rows, move_chunks(exchange, chunks, routes)))


def _halves(x: Shaped[Array, "B rows N H"]) -> Shaped[Array, "2 B half N H"]:
    return jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)


def _rows(x: Shaped[Array, "2 B half N H"]) -> Shaped[Array, "B rows N H"]:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _swap_on_odd_ranks(exchange: CollectiveOptions, x: Array) -> Array:
    """Swaps slots on odd ranks: even halves use slot 0, but an odd rank's front block is odd."""
    return jnp.where(lax.axis_index(exchange.axis_name) % 2 == 1, x[::-1], x)
