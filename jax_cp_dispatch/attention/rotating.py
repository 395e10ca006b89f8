"""Attention while keys rotate: ring, zigzag and Hamilton."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_cp_dispatch._arrays import are_covered, sum_dtype, take_in_bounds, where_or_zero
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.key_chunks import (
    Chunking,
    Schedule,
    move_chunks,
    reverse,
    rows_before,
)
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
    PassOptions,
    RowRanges,
    SoftmaxGradients,
    from_rows,
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
from jax_cp_dispatch.masks import Mask, MaskRanges

# ---- The steps: attention of local queries over keys that rotate through the ranks.
#
# One loop serves ring, zigzag and Hamilton attention, which differ in the schedule of chunks and in
# the layout of tokens. Each step starts the exchange for the next one, and adds the held keys to
# the softmax of the queries, which stay in blocks throughout. The backward pass needs only q, k, v,
# their ranges, out and lse: the keys rotate again, and their gradients follow them. Out is kept
# unrounded, because with few keys dq is a small difference of dout . v and dout . out.


class TokenRanges(NamedTuple):
    """The tokens of the sequence that each of a rank's rows sees."""

    # int32 `[B, rows, 2]`, the first one and one past the last; empty for rows that only pad a
    # block. Both in one array, because XLA for CPU compiles an operation on each.
    bounds: Array
    # bool `[B, rows]`; whether any row may see this one; None: if it sees any itself
    is_key: Array | None = None
    # The rows' own tokens, and the queries of every token of the sequence; None: all
    queries: KeyQueries | None = None
    # `order_error_code` of the tokens; None: known to be in the order of the layout
    fault: Array | None = None


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A call, and how its keys rotate; static."""

    call: Call
    schedule: Schedule  # of the chunks of keys and values; hashable
    chunking: Chunking  # how they are cut, and the layout in which a rank's tokens are computed
    rearranges: bool  # contiguous rows are brought to zigzag order first, and the output back
    passes: PassOptions  # the options of each step
    q_shape: tuple[int, int, int, int]  # `[B, rows, N, H]`
    # K and Hv
    num_groups: int
    value_size: int

    def tile(self, q, kv, ranges: TokenRanges):
        """Returns query blocks, a rank's own chunks, and which rows are used: they see a key."""
        used = ranges.bounds[..., 0] < ranges.bounds[..., 1]
        is_key = used if ranges.is_key is None else ranges.is_key
        unused = 0 if self.call.expansion is None else UNUSED_ROW
        own = (self.chunking.tile(jnp.where(is_key[:, :, None, None], x, unused)) for x in kv)
        q = jnp.where(used[:, :, None, None], q, 0)
        return to_rows(q, self.num_groups, self.passes.block_q), tuple(own), used

    def held_keys(self, held, ranges: TokenRanges, step, rank=None):
        """Reads the chunks that a rank, by default this one, holds at a step.

        Returns the order of their keys; their rows in this order, `[M, S, H]`, or latent rows
        `[B S, F]`; and which of them each query sees.
        """
        rank = lax.axis_index(self.call.exchange.axis_name) if rank is None else rank
        block = self.passes.block_kv
        order = self.chunking.key_order(*self.schedule.held(rank, step))
        num_rows = -(-self.chunking.most_tokens // block) * block
        rows = [order.in_order(x, num_rows) for x in held]
        if self.call.expansion is not None:
            is_row = (jnp.arange(num_rows) < jnp.sum(order.length))[:, None]
            rows = [jnp.where(is_row, x, UNUSED_ROW).reshape(-1, x.shape[2]) for x in rows]
        bounds = rows_before(ranges.bounds, order.start, order.length)
        of_queries = RowRanges(bounds[..., 0], bounds[..., 1])
        if ranges.queries is not None:
            token = order.tokens(num_rows)
            held_by = lambda x: jnp.where(token >= 0, x[:, jnp.maximum(token, 0)], 0)
            start, end = map(held_by, ranges.queries[1:])
            of_queries = of_queries._replace(queries=KeyQueries(ranges.queries.index, start, end))
        of_blocks = self.q_shape, self.num_groups, num_rows
        return order, rows, tile_ranges(self.passes, of_queries, *of_blocks)

    def key_blocks(self, rows):
        """Returns rows of `held_keys`, or `[B S, K, H]` of expanded ones, in blocks of matrices."""
        B, block = self.q_shape[0], self.passes.block_kv
        if self.call.expansion is not None:
            rows = [jnp.swapaxes(x.reshape(B, -1, *x.shape[1:]), 1, 2) for x in rows]
        return [x.reshape(B * self.num_groups, -1, block, x.shape[-1]) for x in rows]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_rotating(rotation: Rotation, operands: Operands, ranges: TokenRanges) -> Outputs:
    """Computes attention of query rows over ranges of tokens of the sequence.

    All operands vary over the axis.
    """
    return _forward(rotation, operands, ranges)[0]


def attend_steps(rotation: Rotation, operands: Operands, ranges: TokenRanges, rank=None):
    """Returns output, lse, and the largest logits if asked for, of this rank's rows, unrounded.

    The sink is not added. A given `rank` computes the part of that rank on one device, with its own
    chunks at every step, and nothing moves.
    """
    call, schedule = rotation.call, rotation.schedule
    exchange = call.exchange if rank is None else None
    queries, own, _ = rotation.tile(operands.q, operands.moved, ranges)
    fingerprint = None
    if ranges.fault is not None:
        fingerprint = order_fingerprint(ranges.fault, lax.axis_index(call.exchange.axis_name))

    def add_keys(held, seen, step):
        _, rows, key_ranges = rotation.held_keys(held, ranges, step, rank)
        if call.expansion is not None:
            rows = call.expansion(operands.weights, rows)
        return attend_blocks(rotation.passes, queries, key_ranges, rotation.key_blocks(rows), seen)

    def one_step(step, carry):
        held, seen = carry
        fetched = schedule.fetch_keys(exchange, own, held, step, fingerprint)
        return fetched, add_keys(held, seen, step)

    held, seen = own, OnlineSoftmax.of_nothing(queries, rotation.value_size)
    last = call.num_ranks - 1
    if last:
        held, seen = lax.fori_loop(0, last, one_step, (held, seen))
    seen, max_logits = add_keys(held, seen, last), None
    shape = rotation.q_shape, rotation.num_groups
    if call.return_max_logits:
        max_logits = jnp.max(seen.max_logits(*shape), axis=(0, 2))
    return *seen.result(*shape), max_logits


def gradient_steps(
    rotation: Rotation, operands: Operands, ranges: TokenRanges, whole: SoftmaxGradients, rank=None
):
    """Returns unrounded gradients of q, of what rotates, and of weights or None.

    `rank`: see `attend_steps`.
    """
    call, schedule, passes = rotation.call, rotation.schedule, rotation.passes
    exchange = call.exchange if rank is None else None
    queries, own, used = rotation.tile(operands.q, operands.moved, ranges)
    cotangents = tile_cotangents(passes, used, whole, rotation.num_groups)
    B = rotation.q_shape[0]

    def gradients(held, dq, step):
        order, rows, key_ranges = rotation.held_keys(held, ranges, step, rank)
        transpose = dweights = None
        if call.expansion is not None:
            rows, transpose = call.expansion.with_transpose(operands.weights, rows)
        kv = rotation.key_blocks(rows)
        dq, *dkv = block_gradients(passes, queries, cotangents, key_ranges, kv, dq)
        dkv = [x.reshape(x.shape[0], -1, x.shape[3]) for x in dkv]
        if transpose is not None:
            by_rows = [jnp.swapaxes(x.reshape(B, -1, *x.shape[1:]), 1, 2) for x in dkv]
            dweights, dkv = transpose(*(x.reshape(-1, *x.shape[2:]) for x in by_rows))
            dkv = jax.tree.map(lambda x: x.reshape(B, -1, x.shape[1]), dkv)
        return dq, tuple(jax.tree.map(order.in_slots, dkv)), dweights

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

    last = call.num_ranks - 1
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
    dkv = jax.tree.map(lambda x: rotation.chunking.untile(x, B), dkv)
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
    shape = operands.q.shape[:2]
    q, k, v, *others = operands.varying(rotation.call.exchange)
    leaves, tree = jax.tree.flatten((q, k, v))
    q, k, v = tree.unflatten(rearranged(rotation, leaves))
    ranges = token_ranges(rotation, packed, shape)
    arrays = vary_alike((Operands(q, k, v, *others), ranges))
    outputs: Any = attend_rotating(rotation, *arrays)
    out, lse, max_logits = outputs
    lses = [] if lse is None else [lse[..., None]]
    out, *lses = rearranged(rotation, (out, *lses), back=True)
    return Outputs(out, lses[0][..., 0] if lses else None, max_logits)


def rearranged(rotation: Rotation, arrays, *, back: bool = False):
    """Brings arrays `[B, T, heads, _]` to the layout of the rotation, or back to the caller's.

    There, blocks are padded. If needed, each half of a rank's rows moves to its rank in zigzag
    order.
    """
    layout, exchange, n = rotation.chunking.layout, rotation.call.exchange, rotation.call.num_ranks
    if not back:  # one more row than there are if halves are uneven
        arrays = tuple(with_rows(x, layout.num_rows, 1) for x in arrays)
    if rotation.rearranges:
        halves = (
            (min(2 * r + half, 2 * n - 1 - 2 * r - half) for r in range(n)) for half in (0, 1)
        )
        routes = tuple(map(tuple, halves))
        # Even halves use slot 0, but the front block of an odd rank is odd.
        is_odd = lax.axis_index(exchange.axis_name) % 2 == 1
        swapped = lambda x: jnp.where(is_odd, x[::-1], x)
        split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)
        chunks = tuple(map(split, arrays))
        if back:
            chunks = move_chunks(exchange, tuple(map(swapped, chunks)), reverse(routes))
        else:
            chunks = tuple(map(swapped, move_chunks(exchange, chunks, routes)))
        rows = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        arrays = named_context(tuple(map(rows, chunks)))
    return tuple(x[:, : layout.num_tokens // n] for x in arrays) if back else arrays


def token_ranges(rotation: Rotation, packed: Documents, shape) -> TokenRanges:
    """Returns the tokens that each of this rank's rows sees, in the rows of the rotation."""
    call = rotation.call
    order = {"layout": call.order.layout, "checks_order": call.checks_order}
    seen, fault = gathered_ranges(call.exchange, packed, shape, **order)
    token = rotation.chunking.layout.positions(lax.axis_index(call.exchange.axis_name))
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
        index = jnp.broadcast_to(token, is_row.shape)
        ranges = ranges._replace(queries=KeyQueries(index, seen.q_start, seen.q_end))
    return ranges
