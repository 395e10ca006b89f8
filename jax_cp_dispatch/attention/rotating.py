"""Attention while keys rotate: ring, zigzag and Hamilton."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jax_cp_dispatch._arrays import are_covered, known_inside, only_where
from jax_cp_dispatch._ranks.options import CollectiveOptions, vary_alike
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.key_chunks import Chunking, KeyOrder, Schedule, move_chunks, reverse
from jax_cp_dispatch.attention.local.blockwise import (
    OnlineSoftmax,
    OutputCotangents,
    SoftmaxGradients,
    begin_dq,
    finish_dq,
    tile_cotangents,
)
from jax_cp_dispatch.attention.local.options import PassOptions, pass_options, rank_blocks
from jax_cp_dispatch.attention.local.passes import (
    add_sink,
    attend_blocks,
    block_gradients,
    forbid_second_derivative,
    sink_gradient,
)
from jax_cp_dispatch.attention.local.ranges import (
    KeyQueries,
    RowRanges,
    tile_queries,
    tile_ranges,
    with_rows,
)
from jax_cp_dispatch.attention.operands import (
    UNUSED_ROW,
    AttentionOptions,
    Expansion,
    Operands,
    Outputs,
    key_shapes,
    rounded,
    softmax_gradients,
)
from jax_cp_dispatch.documents.fingerprint import order_fingerprint
from jax_cp_dispatch.documents.layouts import (
    PackedMask,
    SequenceLayout,
    contiguous_layout,
    gathered_ranges,
    halves_in_zigzag,
    zigzag_layout,
)
from jax_cp_dispatch.masks import Mask, MaskRanges

# ---- Computes attention of local queries over keys and values that rotate through the ranks.
#
# One loop serves ring, zigzag and Hamilton attention, which differ in the schedule of chunks and in
# the layout of tokens. Each step starts the exchange for the next one, and adds the held keys to
# the
# softmax of the queries, which stay in blocks throughout. The backward pass needs only q, k, v,
# their
# ranges, out and lse: the keys rotate again, and their gradients follow them. Out is kept
# unrounded,
# because with few keys dq is a small difference of dout . v and dout . out.


class TokenRanges(NamedTuple):
    """The tokens of the sequence that each of a rank's rows sees.

    Attributes:
      bounds: int32 `[B, rows, 2]`, the first one and one past the last; empty for rows that only
        pad a block. Both in one array, because XLA for CPU compiles an operation on each.
      is_key: bool `[B, rows]`; whether any row may see this one; None: if it sees any itself.
      queries: the rows' own tokens, and the queries of every token of the sequence; None: all.
      fault: `order_fault` of the tokens; None: known to be in the order of the layout.
    """

    bounds: Array
    is_key: Array | None = None
    queries: KeyQueries | None = None
    fault: Array | None = None

    @property
    def start(self) -> Array:
        return self.bounds[..., 0]

    @property
    def end(self) -> Array:
        return self.bounds[..., 1]

    @property
    def used(self) -> Array:
        return self.start < self.end


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The static part of a call."""

    schedule: Schedule  # hashable
    layout: SequenceLayout
    exchange: CollectiveOptions
    passes: PassOptions
    q_shape: tuple[int, int, int, int]  # [B, rows, N, H]
    num_groups: int  # K
    value_size: int  # Hv
    return_lse: bool = False
    expansion: Expansion | None = None  # of latent rows

    @property
    def last_step(self) -> int:
        return self.schedule.num_ranks - 1

    @property
    def chunking(self) -> Chunking:
        return Chunking(self.layout, self.schedule.num_chunks)

    def cut(self, q, kv, ranges: TokenRanges):
        """Cuts query blocks and a rank's own chunks; rows with empty ranges are unused."""
        used = ranges.used
        is_key = used if ranges.is_key is None else ranges.is_key
        unused = 0 if self.expansion is None else UNUSED_ROW
        own = (self.chunking.cut(jnp.where(is_key[:, :, None, None], x, unused)) for x in kv)
        return tile_queries(self.passes, q, used, self.num_groups), tuple(own)

    def begin(self, q, kv, ranges: TokenRanges):
        """Returns query blocks, a rank's own chunks, and the softmax before the first step."""
        queries, own = self.cut(q, kv, ranges)
        return queries, own, OnlineSoftmax.of_nothing(queries, self.value_size)

    def uncut_gradients(self, dkv):
        return jax.tree.map(lambda x: self.chunking.uncut(x, self.q_shape[0]), dkv)

    def tile_cotangents(self, ranges: TokenRanges, whole: SoftmaxGradients) -> OutputCotangents:
        return tile_cotangents(self.passes, ranges.used, whole, self.num_groups)

    def fetch_keys(self, own, held, step, fingerprint=None):
        """Fetches the chunks of the next step."""
        return self.schedule.fetch_keys(self.exchange, own, held, step, fingerprint)

    def return_gradients(self, travelling, home, step):
        return self.schedule.return_gradients(self.exchange, travelling, home, step)

    def key_order(self, step, rank=None) -> KeyOrder:
        """Returns the order of the keys that a rank, by default this one, holds at a step."""
        rank = lax.axis_index(self.exchange.axis_name) if rank is None else rank
        return self.chunking.key_order(*self.schedule.held(rank, step))

    def attend(
        self, queries, ranges, held, seen: OnlineSoftmax, order: KeyOrder, weights: Any
    ) -> OnlineSoftmax:
        """Adds the keys that are held, in this order."""
        rows = self._ordered(held, order)
        if self.expansion is not None:
            rows = self._by_heads(self.expansion(weights, rows))
        key_ranges = self._key_ranges(ranges, order)
        return attend_blocks(self.passes, queries, key_ranges, self._blocks(rows), seen)

    def result(self, seen: OnlineSoftmax):
        """Output, logarithm of the sum of exponentials, and the largest logits or None."""
        asked = self.passes.return_max_logits
        max_logits = None
        if asked:
            max_logits = jnp.max(seen.max_logits(self.q_shape, self.num_groups), axis=(0, 2))
        return *seen.result(self.q_shape, self.num_groups), max_logits

    def gradients(
        self, queries: tuple[Any, OutputCotangents], ranges, held, dq, order: KeyOrder, weights
    ):
        """Adds to dq; returns the gradients of the held chunks, and of the weights or None."""
        q, cotangents = queries
        rows, transpose = self._ordered(held, order), None
        if self.expansion is not None:
            expanded, transpose = self.expansion.with_transpose(weights, rows)
            rows = self._by_heads(expanded)
        key_ranges, kv = self._key_ranges(ranges, order), self._blocks(rows)
        dq, *dkv = block_gradients(self.passes, q, cotangents, key_ranges, kv, dq)
        dkv, dweights = [x.reshape(x.shape[0], -1, x.shape[3]) for x in dkv], None
        if transpose is not None:
            dweights, dkv = transpose(*map(self._by_rows, dkv))
            dkv = jax.tree.map(self._of_one_head, dkv)
        return dq, tuple(jax.tree.map(order.in_slots, dkv)), dweights

    def finish_dq(self, dq):
        return finish_dq(dq, self.q_shape, self.num_groups)

    @property
    def _num_rows(self) -> int:
        block = self.passes.block_kv
        return -(-self.chunking.most_tokens // block) * block

    def _ordered(self, held, order: KeyOrder):
        """Returns held rows in sequence order: `[M, S, H]`, or latent rows `[B S, F]`."""
        rows = [order.in_order(x, self._num_rows) for x in held]
        if self.expansion is None:
            return rows
        is_row = (jnp.arange(self._num_rows) < jnp.sum(order.length))[:, None]
        return [jnp.where(is_row, x, UNUSED_ROW).reshape(-1, x.shape[2]) for x in rows]

    def _blocks(self, rows):
        block = self.passes.block_kv
        return [x.reshape(x.shape[0], -1, block, x.shape[2]) for x in rows]

    # ---- Expanded rows, `[B S, K, H]`, as matrices `[B K, S, H]`, and back.

    def _by_heads(self, expanded):
        shape = self.q_shape[0], self._num_rows
        swapped = (jnp.swapaxes(x.reshape(*shape, *x.shape[1:]), 1, 2) for x in expanded)
        return [x.reshape(-1, *x.shape[2:]) for x in swapped]

    def _by_rows(self, x):
        x = jnp.swapaxes(x.reshape(self.q_shape[0], -1, *x.shape[1:]), 1, 2)
        return x.reshape(-1, *x.shape[2:])

    def _of_one_head(self, x):
        return x.reshape(self.q_shape[0], self._num_rows, -1)

    def _key_ranges(self, ranges, order: KeyOrder):
        num_rows = self._num_rows
        bounds = order.rows_before(ranges.bounds)
        rows = RowRanges(bounds[..., 0], bounds[..., 1])
        if ranges.queries is not None:
            of_keys = order.tokens(num_rows)
            held_by = lambda x: jnp.where(of_keys >= 0, x[:, jnp.maximum(of_keys, 0)], 0)
            start, end = map(held_by, ranges.queries[1:])
            rows = rows._replace(queries=KeyQueries(ranges.queries.index, start, end))
        return tile_ranges(self.passes, rows, self.q_shape, self.num_groups, num_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_rotating(rotation: Rotation, operands: Operands, ranges: TokenRanges) -> Outputs:
    """Computes attention of query rows over ranges of tokens of the sequence.

    All operands vary over the axis.
    """
    return _forward(rotation, operands, ranges)[0]


def forward(rotation: Rotation, operands: Operands, ranges: TokenRanges, rank=None):
    """Returns output, lse, and the largest logits if asked for, of this rank's rows, unrounded.

    The sink is not added. A given `rank` computes the part of that rank, on one device, if the
    schedule moves nothing.
    """
    queries, own, seen = rotation.begin(operands.q, operands.moved, ranges)
    weights, last = operands.weights, rotation.last_step
    fingerprint = None
    if ranges.fault is not None:
        here = lax.axis_index(rotation.exchange.axis_name)
        fingerprint = order_fingerprint(ranges.fault, here)

    def attend(held, seen, step):
        order = rotation.key_order(step, rank)
        return rotation.attend(queries, ranges, held, seen, order, weights)

    def one_step(step, carry):
        held, seen = carry
        return rotation.fetch_keys(own, held, step, fingerprint), attend(held, seen, step)

    held = own
    if last:
        held, seen = lax.fori_loop(0, last, one_step, (held, seen))
    return rotation.result(attend(held, seen, last))


def backward(rotation: Rotation, operands: Operands, ranges: TokenRanges, outputs, rank=None):
    """Returns unrounded gradients of q, of what rotates, and of weights or None.

    `outputs`: out, lse, dout, dlse.
    """
    queries, own = rotation.cut(operands.q, operands.moved, ranges)
    weights, last = operands.weights, rotation.last_step
    cotangents = rotation.tile_cotangents(ranges, SoftmaxGradients(*outputs))

    def gradients(held, dq, step):
        order = rotation.key_order(step, rank)
        return rotation.gradients((queries, cotangents), ranges, held, dq, order, weights)

    def add_step(held, sums, travelling, home, step):
        dq, dweights = sums
        arrived, home = rotation.return_gradients(travelling, home, step)
        dq, dkv, added = gradients(held, dq, step)
        if arrived is not None:
            dkv = jax.tree.map(jnp.add, arrived, dkv)
        return (dq, jax.tree.map(jnp.add, dweights, added)), dkv, home

    def one_step(step, carry):
        held, sums, travelling, home = carry
        following = rotation.fetch_keys(own, held, step)
        return following, *add_step(held, sums, travelling, home, step)

    held = rotation.fetch_keys(own, own, 0) if last else own
    dq, dkv, dweights = gradients(own, begin_dq(queries), 0)
    if last:
        travelling, home = rotation.schedule.begin(dkv)
        carry = held, (dq, dweights), travelling, home
        if last > 1:  # `jax.disable_jit` rejects a loop without steps
            carry = lax.fori_loop(1, last, one_step, carry)
        held, sums, travelling, home = carry
        (dq, dweights), travelling, home = add_step(held, sums, travelling, home, last)
        arrived, home = rotation.return_gradients(travelling, home, last + 1)
        dkv = home if arrived is None else arrived
    return rotation.finish_dq(dq), rotation.uncut_gradients(dkv), dweights


def _forward(rotation, operands: Operands, ranges):
    operands = forbid_second_derivative(rotation.exchange.op, operands)
    out, lse, max_logits = forward(rotation, operands, ranges)
    out, lse = add_sink(out, lse, operands.sink)
    if ranges.fault is not None:  # one rank, and XLA's collectives, raise no error
        out = jnp.where(ranges.fault == 0, out, jnp.nan)
    out, lse = named_context((out, lse))
    if max_logits is not None:
        max_logits = lax.pmax(max_logits, rotation.exchange.axis_name)
    returned_lse = jnp.swapaxes(lse, 1, 2) if rotation.return_lse else None
    outputs = Outputs(out.astype(operands.q.dtype), returned_lse, max_logits)
    return outputs, (operands, ranges, out, lse)


def _backward(rotation, residuals, cotangents: Outputs):
    operands, ranges, out, lse = residuals
    q, _, v, sink, weights = operands
    whole = softmax_gradients(rotation.exchange.op, out, lse, cotangents)
    dq, moved, dweights = backward(rotation, operands, ranges, whole)
    dsink = None if sink is None else sink_gradient(sink, whole)
    dq, moved = dq.astype(q.dtype), rounded(moved, operands.moved)
    if v is not None:
        dk, dv = moved
        return Operands(dq, dk, dv, dsink), None
    return Operands(dq, moved, None, dsink, rounded(dweights, weights)), None


attend_rotating.defvjp(_forward, _backward)


# ---- Attention over the ranks for this rank's rows of a sequence, in every layout.


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
        passes = pass_options(
            *(q, k),
            scale=self.options.scale,
            logit_soft_cap=self.options.logit_soft_cap,
            return_max_logits=self.options.return_max_logits,
            **rank_blocks(layout.num_rows, held, N, K, rows=256),
        )
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
