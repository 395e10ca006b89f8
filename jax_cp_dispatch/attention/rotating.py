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

from jax_cp_dispatch._arrays import are_covered, sum_dtype, take_in_bounds, where_or_zero
from jax_cp_dispatch._ranks.options import CollectiveOptions, vary_alike
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.key_chunks import Chunking, KeyOrder, Schedule, move_chunks, reverse
from jax_cp_dispatch.attention.local.passes import (
    add_sink,
    attend_blocks,
    block_gradients,
    forbid_second_derivative,
    sink_gradient,
)
from jax_cp_dispatch.attention.local.ranges import (
    KeyQueries,
    OnlineSoftmax,
    OutputCotangents,
    PassOptions,
    RowRanges,
    SoftmaxGradients,
    from_rows,
    pass_options,
    rank_blocks,
    tile_cotangents,
    tile_ranges,
    to_rows,
    with_rows,
)
from jax_cp_dispatch.attention.operands import (
    UNUSED_ROW,
    Call,
    Operands,
    Outputs,
    rounded,
    softmax_gradients,
)
from jax_cp_dispatch.documents.documents import Documents, gathered_ranges
from jax_cp_dispatch.documents.fingerprint import order_fingerprint
from jax_cp_dispatch.documents.layouts import (
    SequenceLayout,
    contiguous_layout,
    halves_in_zigzag,
    zigzag_layout,
)
from jax_cp_dispatch.masks import Mask, MaskRanges

# ---- The steps: attention of local queries over keys that rotate through the ranks.
#
# One loop serves ring, zigzag and Hamilton attention, which differ in the schedule of chunks and in
# the layout of tokens. Each step starts the exchange for the next one, and adds the held keys to
# the softmax of the queries, which stay in blocks throughout. The backward pass needs only q, k, v,
# their ranges, out and lse: the keys rotate again, and their gradients follow them. Out is kept
# unrounded, because with few keys dq is a small difference of dout . v and dout . out.


class TokenRanges(NamedTuple):
    """The tokens of the sequence that each of a rank's rows sees.

    Attributes:
      bounds: int32 `[B, rows, 2]`, the first one and one past the last; empty for rows that only
        pad a block. Both in one array, because XLA for CPU compiles an operation on each.
      is_key: bool `[B, rows]`; whether any row may see this one; None: if it sees any itself.
      queries: the rows' own tokens, and the queries of every token of the sequence; None: all.
      fault: `order_error_code` of the tokens; None: known to be in the order of the layout.
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
    """A call, and how its keys rotate; static.

    Attributes:
      schedule: of the chunks of keys and values; hashable.
      layout: in which a rank's tokens are computed.
      rearranges: contiguous rows are brought to zigzag order first, and the output back.
      passes: the options of each step.
      q_shape: `[B, rows, N, H]`.
      num_groups, value_size: K and Hv.
    """

    call: Call
    schedule: Schedule
    layout: SequenceLayout
    rearranges: bool
    passes: PassOptions
    q_shape: tuple[int, int, int, int]
    num_groups: int
    value_size: int

    @classmethod
    def of(cls, call: Call, schedule: Schedule, q, k, v, *, zigzag: bool) -> Rotation:
        """Returns the rotation of one rank's arrays, or of their shapes and dtypes.

        `zigzag`: compute in zigzag layout.
        """
        (B, T, N, H), K = q.shape, k.shape[2]
        rearranges = zigzag and call.order.layout == "contiguous" and call.num_ranks > 1
        make = halves_in_zigzag if rearranges else contiguous_layout
        if call.order.layout == "zigzag":
            make = zigzag_layout
        layout = make(call.num_ranks, T)
        most_keys = Chunking(layout, schedule.num_chunks).most_tokens
        blocks = rank_blocks(layout.num_rows, most_keys, N, K, rows=256)
        passes = pass_options(q, k, **call.softmax, **blocks)
        shape = B, layout.num_rows, N, H
        return cls(call, schedule, layout, rearranges, passes, shape, K, v.shape[3])

    @property
    def chunking(self) -> Chunking:
        return Chunking(self.layout, self.schedule.num_chunks)

    def tile(self, q, kv, ranges: TokenRanges):
        """Returns query blocks and a rank's own chunks; rows with empty ranges are unused."""
        used = ranges.used
        is_key = used if ranges.is_key is None else ranges.is_key
        unused = 0 if self.call.expansion is None else UNUSED_ROW
        own = (self.chunking.tile(jnp.where(is_key[:, :, None, None], x, unused)) for x in kv)
        q = jnp.where(used[:, :, None, None], q, 0)
        return to_rows(q, self.num_groups, self.passes.block_q), tuple(own)

    def begin(self, q, kv, ranges: TokenRanges):
        """Returns query blocks, a rank's own chunks, and the softmax before the first step."""
        queries, own = self.tile(q, kv, ranges)
        return queries, own, OnlineSoftmax.of_nothing(queries, self.value_size)

    def key_order(self, step, rank=None) -> KeyOrder:
        """Returns the order of the keys that a rank, by default this one, holds at a step."""
        rank = lax.axis_index(self.call.exchange.axis_name) if rank is None else rank
        return self.chunking.key_order(*self.schedule.held(rank, step))

    def add_keys(
        self, queries, ranges, held, seen: OnlineSoftmax, order: KeyOrder, weights: Any
    ) -> OnlineSoftmax:
        """Adds the keys that are held, in this order, to the softmax."""
        rows = self._ordered(held, order)
        if self.call.expansion is not None:
            rows = self._by_heads(self.call.expansion(weights, rows))
        key_ranges = self._key_ranges(ranges, order)
        return attend_blocks(self.passes, queries, key_ranges, self._blocks(rows), seen)

    def result(self, seen: OnlineSoftmax):
        """Output, logarithm of the sum of exponentials, and the largest logits or None."""
        max_logits = None
        if self.call.return_max_logits:
            max_logits = jnp.max(seen.max_logits(self.q_shape, self.num_groups), axis=(0, 2))
        return *seen.result(self.q_shape, self.num_groups), max_logits

    def add_gradients(
        self, queries: tuple[Any, OutputCotangents], ranges, held, dq, order: KeyOrder, weights
    ):
        """Adds to dq; returns the gradients of the held chunks, and of the weights or None."""
        q, cotangents = queries
        rows, transpose = self._ordered(held, order), None
        if self.call.expansion is not None:
            expanded, transpose = self.call.expansion.with_transpose(weights, rows)
            rows = self._by_heads(expanded)
        key_ranges, kv = self._key_ranges(ranges, order), self._blocks(rows)
        dq, *dkv = block_gradients(self.passes, q, cotangents, key_ranges, kv, dq)
        dkv, dweights = [x.reshape(x.shape[0], -1, x.shape[3]) for x in dkv], None
        if transpose is not None:
            dweights, dkv = transpose(*map(self._by_rows, dkv))
            dkv = jax.tree.map(self._of_one_head, dkv)
        return dq, tuple(jax.tree.map(order.in_slots, dkv)), dweights

    @property
    def _num_rows(self) -> int:
        block = self.passes.block_kv
        return -(-self.chunking.most_tokens // block) * block

    def _ordered(self, held, order: KeyOrder):
        """Returns held rows in sequence order: `[M, S, H]`, or latent rows `[B S, F]`."""
        rows = [order.in_order(x, self._num_rows) for x in held]
        if self.call.expansion is None:
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


def attend_steps(rotation: Rotation, operands: Operands, ranges: TokenRanges, rank=None):
    """Returns output, lse, and the largest logits if asked for, of this rank's rows, unrounded.

    The sink is not added. A given `rank` computes the part of that rank, on one device, if the
    schedule moves nothing.
    """
    schedule, exchange = rotation.schedule, rotation.call.exchange
    queries, own, seen = rotation.begin(operands.q, operands.moved, ranges)
    fingerprint = None
    if ranges.fault is not None:
        fingerprint = order_fingerprint(ranges.fault, lax.axis_index(exchange.axis_name))

    def add_keys(held, seen, step):
        order = rotation.key_order(step, rank)
        return rotation.add_keys(queries, ranges, held, seen, order, operands.weights)

    def one_step(step, carry):
        held, seen = carry
        fetched = schedule.fetch_keys(exchange, own, held, step, fingerprint)
        return fetched, add_keys(held, seen, step)

    held, last = own, schedule.num_ranks - 1
    if last:
        held, seen = lax.fori_loop(0, last, one_step, (held, seen))
    return rotation.result(add_keys(held, seen, last))


def gradient_steps(rotation: Rotation, operands: Operands, ranges: TokenRanges, whole, rank=None):
    """Returns unrounded gradients of q, of what rotates, and of weights or None.

    `whole`: out, lse, dout, dlse.
    """
    schedule, exchange = rotation.schedule, rotation.call.exchange
    queries, own = rotation.tile(operands.q, operands.moved, ranges)
    whole = SoftmaxGradients(*whole)  # a profile passes a tuple
    cotangents = tile_cotangents(rotation.passes, ranges.used, whole, rotation.num_groups)

    def gradients(held, dq, step):
        order, of_queries = rotation.key_order(step, rank), (queries, cotangents)
        return rotation.add_gradients(of_queries, ranges, held, dq, order, operands.weights)

    def add_step(held, sums, travelling, home, step):
        dq, dweights = sums
        arrived, home = schedule.return_gradients(exchange, travelling, home, step)
        dq, dkv, added = gradients(held, dq, step)
        if arrived is not None:
            dkv = jax.tree.map(jnp.add, arrived, dkv)
        return (dq, jax.tree.map(jnp.add, dweights, added)), dkv, home

    def one_step(step, carry):
        held, sums, travelling, home = carry
        following = schedule.fetch_keys(exchange, own, held, step)
        return following, *add_step(held, sums, travelling, home, step)

    last = schedule.num_ranks - 1
    held = schedule.fetch_keys(exchange, own, own, 0) if last else own
    dq = jnp.zeros_like(jnp.swapaxes(queries, 2, 3), sum_dtype(queries.dtype))
    dq, dkv, dweights = gradients(own, dq, 0)
    if last:
        travelling, home = schedule.begin(dkv)
        carry = held, (dq, dweights), travelling, home
        if last > 1:  # `jax.disable_jit` rejects a loop without steps
            carry = lax.fori_loop(1, last, one_step, carry)
        held, sums, travelling, home = carry
        (dq, dweights), travelling, home = add_step(held, sums, travelling, home, last)
        arrived, home = schedule.return_gradients(exchange, travelling, home, last + 1)
        dkv = home if arrived is None else arrived
    dkv = jax.tree.map(lambda x: rotation.chunking.untile(x, rotation.q_shape[0]), dkv)
    dq = from_rows(jnp.swapaxes(dq, 2, 3), rotation.q_shape, rotation.num_groups)
    return dq, dkv, dweights


def _forward(rotation: Rotation, operands: Operands, ranges: TokenRanges):
    call = rotation.call
    operands = forbid_second_derivative(call.op, operands)
    out, lse, max_logits = attend_steps(rotation, operands, ranges)
    out, lse = add_sink(out, lse, operands.sink)
    if ranges.fault is not None:  # one rank, and XLA's collectives, raise no error
        out = jnp.where(ranges.fault == 0, out, jnp.nan)
    out, lse = named_context((out, lse))
    if max_logits is not None:
        max_logits = lax.pmax(max_logits, call.exchange.axis_name)
    returned_lse = jnp.swapaxes(lse, 1, 2) if call.return_lse else None
    outputs = Outputs(out.astype(operands.q.dtype), returned_lse, max_logits)
    return outputs, (operands, ranges, out, lse)


def _backward(rotation: Rotation, residuals, cotangents: Outputs):
    operands, ranges, out, lse = residuals
    whole = softmax_gradients(rotation.call.op, out, lse, cotangents)
    dq, dmoved, dweights = gradient_steps(rotation, operands, ranges, whole)
    dmoved = rounded(dmoved, operands.moved)
    dk, dv = (dmoved, None) if operands.v is None else dmoved
    dsink = None if operands.sink is None else sink_gradient(operands.sink, whole)
    dweights = None if dweights is None else rounded(dweights, operands.weights)
    return Operands(dq.astype(operands.q.dtype), dk, dv, dsink, dweights), None


attend_rotating.defvjp(_forward, _backward)


# ---- Before and after the steps: the layout of rows, and what they see.


@partial(jax.jit, static_argnums=0)  # equal calls of a program are traced and lowered once
def attend_sequence(rotation: Rotation, operands: Operands, packed: Documents) -> Outputs:
    B, T = operands.q.shape[:2]
    q, k, v, *others = operands.varying(rotation.call.exchange)
    leaves, tree = jax.tree.flatten((q, k, v))
    q, k, v = tree.unflatten(to_layout(rotation, leaves))
    ranges = token_ranges(rotation, packed, (B, T))
    arrays = vary_alike((Operands(q, k, v, *others), ranges))
    outputs: Any = attend_rotating(rotation, *arrays)
    out, lse, max_logits = outputs
    lses = [] if lse is None else [lse[..., None]]
    out, *lses = from_layout(rotation, (out, *lses), T)
    return Outputs(out, lses[0][..., 0] if lses else None, max_logits)


def to_layout(rotation: Rotation, arrays):
    """Arranges this rank's rows for the rotation: padded blocks, in zigzag order if needed."""
    num_rows = rotation.layout.num_rows  # one more than there are if halves are uneven
    arrays = tuple(with_rows(x, num_rows, 1) for x in arrays)
    if not rotation.rearranges:
        return arrays
    exchange = rotation.call.exchange
    moved = move_chunks(exchange, tuple(map(_halves, arrays)), _zigzag_routes(rotation))
    return named_context(tuple(_rows(_swap_on_odd_ranks(exchange, x)) for x in moved))


def from_layout(rotation: Rotation, arrays, num_tokens: int):
    """Restores the caller's layout of arrays `[B, rows, N, _]`."""
    if rotation.rearranges:
        exchange, routes = rotation.call.exchange, reverse(_zigzag_routes(rotation))
        chunks = tuple(_swap_on_odd_ranks(exchange, _halves(x)) for x in arrays)
        arrays = named_context(tuple(map(_rows, move_chunks(exchange, chunks, routes))))
    return tuple(x[:, :num_tokens] for x in arrays)


def token_ranges(rotation: Rotation, packed: Documents, shape) -> TokenRanges:
    """Returns the tokens that each of this rank's rows sees, in the rows of the rotation."""
    call = rotation.call
    order = {"layout": call.order.layout, "checks_order": call.checks_order}
    seen, fault = gathered_ranges(call.exchange, packed, shape, **order)
    token = rotation.layout.positions(lax.axis_index(call.exchange.axis_name))
    ranges = ranges_of_rows(packed.mask, seen, token)._replace(fault=fault)
    return named_context(vary_alike(ranges, also=call.exchange.axis_names))


def ranges_of_rows(mask: Mask, seen: MaskRanges, token: Any) -> TokenRanges:
    """Returns what the rows of `token` see, of what all tokens see; token -1 pads a block."""
    is_row = jnp.broadcast_to(token >= 0, (len(seen.k_start), *token.shape))
    of_rows = lambda x: where_or_zero(is_row, take_in_bounds(x, jnp.maximum(token, 0), axis=1))
    ranges = TokenRanges(of_rows(jnp.stack([seen.k_start, seen.k_end], axis=2)))
    if mask.has_arrays:
        is_key = are_covered(seen.k_start, seen.k_end, seen.k_start.shape[1])
        ranges = ranges._replace(is_key=of_rows(is_key))
    if seen.q_start is not None:
        index = jnp.broadcast_to(token, ranges.start.shape)
        ranges = ranges._replace(queries=KeyQueries(index, seen.q_start, seen.q_end))
    return ranges


def _zigzag_routes(rotation: Rotation):
    """Returns the routes of halves 2 r and 2 r + 1 of the sequence from rank r to zigzag order."""
    n = rotation.call.num_ranks
    block_of = lambda half: min(half, 2 * n - 1 - half)
    return tuple(tuple(block_of(2 * r + half) for r in range(n)) for half in range(2))


def _halves(x: Shaped[Array, "B rows N H"]) -> Shaped[Array, "2 B half N H"]:
    return jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)


def _rows(x: Shaped[Array, "2 B half N H"]) -> Shaped[Array, "B rows N H"]:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _swap_on_odd_ranks(exchange: CollectiveOptions, x: Array) -> Array:
    """Swaps slots on odd ranks: even halves use slot 0, but an odd rank's front block is odd."""
    return jnp.where(lax.axis_index(exchange.axis_name) % 2 == 1, x[::-1], x)
