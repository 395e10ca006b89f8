"""Computes attention of local queries over keys and values that rotate through the ranks.

One loop serves ring, zigzag and Hamilton attention, which differ in the schedule of chunks and in
the layout of tokens. Each step starts the exchange for the next one, and adds the held keys to the
softmax of the queries, which stay in blocks throughout. The backward pass needs only q, k, v, their
ranges, out and lse: the keys rotate again, and their gradients follow them. Out is kept unrounded,
because with few keys dq is a small difference of dout . v and dout . out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.latents import UNUSED_ROW, Expansion
from jax_cp_dispatch.attention.local.backward import (
    OutputCotangents,
    SoftmaxGradients,
    begin_dq,
    cut_cotangents,
    finish_dq,
)
from jax_cp_dispatch.attention.local.blocks import RowRanges, cut_queries, cut_ranges
from jax_cp_dispatch.attention.local.forward import OnlineSoftmax
from jax_cp_dispatch.attention.local.local_options import PassOptions
from jax_cp_dispatch.attention.local.passes import attend_blocks, block_gradients
from jax_cp_dispatch.attention.local.query_ranges import KeyQueries
from jax_cp_dispatch.attention.local.sink import add_sink, sink_gradient
from jax_cp_dispatch.attention.operands import Operands, Outputs, rounded, softmax_gradients
from jax_cp_dispatch.attention.rotating.key_chunks import Chunking, KeyOrder
from jax_cp_dispatch.attention.rotating.schedules import Schedule
from jax_cp_dispatch.documents.fingerprint import order_fingerprint
from jax_cp_dispatch.documents.layouts import SequenceLayout


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
        return cut_queries(self.passes, q, used, self.num_groups), tuple(own)

    def begin(self, q, kv, ranges: TokenRanges):
        """Returns query blocks, a rank's own chunks, and the softmax before the first step."""
        queries, own = self.cut(q, kv, ranges)
        return queries, own, OnlineSoftmax.of_nothing(queries, self.value_size)

    def uncut_gradients(self, dkv):
        return jax.tree.map(lambda x: self.chunking.uncut(x, self.q_shape[0]), dkv)

    def cut_cotangents(self, ranges: TokenRanges, whole: SoftmaxGradients) -> OutputCotangents:
        return cut_cotangents(self.passes, ranges.used, whole, self.num_groups)

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
        return cut_ranges(self.passes, rows, self.q_shape, self.num_groups, num_rows)


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
    cotangents = rotation.cut_cotangents(ranges, SoftmaxGradients(*outputs))

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
    operands = operands.derived_once(rotation.exchange.op)
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
