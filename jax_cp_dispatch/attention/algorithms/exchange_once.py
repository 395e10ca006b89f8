"""Attention that exchanges once before it and once after it; its derivative does the reverse.

    keys, and maybe queries, go to the ranks that attend them; attention there; the output returns

Each rank attends to the received rows in one call, and keeps them with the output and its lse for
the backward pass, which moves the gradients by the transposes of the same exchanges. All algorithms
that exchange once share this derivative. They differ in their `Movement`.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch._arrays import are_covered, only_if_right, sum_dtype
from jax_cp_dispatch._dispatch.arguments import Argument
from jax_cp_dispatch._dispatch.movement import move, start
from jax_cp_dispatch._ranks.implementations import moves_beside_work
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.local.local_attention import attend_ranges, range_gradients
from jax_cp_dispatch.attention.local.passes import forbid_second_derivative, sink_gradient
from jax_cp_dispatch.attention.local.picked import PickedRows
from jax_cp_dispatch.attention.local.ranges import (
    PassOptions,
    RowRanges,
    pass_options,
    rank_blocks,
)
from jax_cp_dispatch.attention.operands import (
    UNUSED_ROW,
    Call,
    Operands,
    Outputs,
    rounded,
    softmax_gradients,
)
from jax_cp_dispatch.documents.fingerprint import WRONG_MASK, confirmed, order_fingerprint
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.metadata import Metadata


class PendingExchange(NamedTuple):
    """One exchange: what moves, and how to read what comes."""

    # The arguments of `move`; None: nothing moves, or all has moved already
    moved: list[Argument] | None
    read: Callable[[Any], Any]  # from what came, or from None, to the arrays of the receiver

    def completed(self, options: CollectiveOptions) -> Any:
        return self.read(None if self.moved is None else move(options, self.moved))


class Gathered(NamedTuple):
    """What has no derivative: what attended rows see, and what the exchanges read."""

    ranges: MaskRanges  # of the rows that this rank attends
    # The `order_error_code` for which the output is NaN, if no exchange of a plan does that
    fault: Array | None = None
    fingerprint: Array | None = None  # what ranks compare, or None
    # Of a plan, for the rows that move
    q_metadata: Metadata | None = None
    kv_metadata: Metadata | None = None
    # `DocumentRows`, where the keys of attended rows are, of a call that needs all of them
    rows: Any = None


class Movement(abc.ABC):
    """What moves: four exchanges, of which two are the transposes of the others. Hashable.

    The arrays that a rank attends are `[b, rows, ...]`; those of the caller may have another shape.
    """

    call: Call
    block_rows: int  # of a query block's matrix
    in_parts: bool  # rows are `[T, N, H]`, and their heads may move in several parts
    sums_dkv: bool  # gradients of keys are rounded after they have moved, to be summed first

    @abc.abstractmethod
    def send(self, gathered: Gathered, part: Operands) -> PendingExchange:
        """Queries, with their picks, and keys go to the ranks that attend them: (q, kv)."""

    @abc.abstractmethod
    def give_back(self, gathered: Gathered, out: Array, lse: Array) -> PendingExchange:
        """The output returns, with its lse if asked for: (out, lse), of the caller's rows."""

    @abc.abstractmethod
    def send_cotangents(self, gathered: Gathered, cotangents: Outputs) -> PendingExchange:
        """The transpose of `give_back`."""

    @abc.abstractmethod
    def give_back_gradients(self, gathered: Gathered, dq: Any, dkv: Any) -> PendingExchange:
        """The transpose of `send`: (dq, dkv), of the caller's rows."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_attend(movement: Movement, operands: Operands, gathered: Gathered) -> Outputs:
    """Computes attention of this rank's rows; the largest logits are those of its own heads."""
    return _forward(movement, operands, gathered)[0]


def _forward(movement: Movement, operands: Operands, gathered: Gathered):
    call, ranges = movement.call, gathered.ranges
    operands = forbid_second_derivative(call.op, operands)
    parts = parts_of_heads(call, operands) if movement.in_parts else [operands]

    def work(part: Operands, came: tuple[Any, Any]):
        (q, kv), picks = came, None
        if call.pick_block:
            q, picks = q
        keys = kv
        if call.expansion is not None:
            keys = _by_batch(kv, call.expansion(part.weights, rows_to_expand(kv, ranges)))
        passes = row_passes(call, movement.block_rows, q, keys[0])
        keys = keys[:1] if passes.value_size else keys
        if picks is None:
            rows: Any = RowRanges.of_mask(ranges, q.shape[:2])
        else:
            rows = PickedRows(picks, gathered.rows)
        out, lse, *largest = attend_ranges(passes, q, keys, rows, part.sink)
        if picks is not None:
            out, lse = only_of_own_picks(call.exchange, rows, call.pick_block, (out, lse))
        if gathered.fault is not None:
            out = jnp.where(gathered.fault == 0, out, jnp.nan)
        return (q, picks, kv), *named_context((out, lse)), *largest

    done = pipelined_over_heads(
        call.exchange,
        parts,
        work,
        send=partial(movement.send, gathered),
        give_back=lambda outputs: movement.give_back(gathered, *outputs[1:3]),
    )
    received, out, lse, *largest = zip(*(outputs for outputs, _ in done), strict=True)
    outputs = Outputs(*_join([returned for _, returned in done], 1))
    if largest:
        outputs = outputs._replace(max_logits=_join(largest[0], 0))
    return outputs, (received, out, lse, operands.sink, operands.weights, gathered)


def _backward(movement: Movement, residuals, cotangents: Outputs):
    received, out, lse, sink, weights, gathered = residuals
    call, op, ranges = movement.call, movement.call.op, gathered.ranges
    given = [x for x in forbid_second_derivative(op, cotangents)[:2] if x is not None]
    ends = list(itertools.accumulate(q.shape[2] for q, *_ in received))[:-1]
    split = lambda x, axis: jnp.split(x, ends, axis) if ends else [x]
    sinks = [None] * len(received) if sink is None else split(sink, 0)
    pieces = zip(*(split(x, 1) for x in given), strict=True)
    parts = list(zip(received, out, lse, sinks, pieces, strict=True))

    def work(part, came: Outputs):
        (q, picks, kv), out, lse, sink, _ = part
        whole = softmax_gradients(op, out, lse, came)
        keys, transpose = kv, None
        if call.expansion is not None:
            latent = rows_to_expand(kv, ranges)
            expanded, transpose = call.expansion.with_transpose(weights, latent)
            keys = _by_batch(kv, expanded)
        dtype = None if movement.sums_dkv else q.dtype
        passes = row_passes(call, movement.block_rows, q, keys[0], dtype)
        passes = dataclasses.replace(passes, return_max_logits=False)
        if picks is None:
            rows: Any = RowRanges.of_mask(ranges, q.shape[:2])
        else:
            rows = PickedRows(picks, gathered.rows)
        dq, *dkv = range_gradients(passes, q, keys[:1] if passes.value_size else keys, rows, whole)
        if passes.value_size:  # dk is of the values too
            dkv.append(jnp.zeros_like(keys[1], dkv[0].dtype))
        dweights = None
        if transpose is not None:
            dweights, drows = transpose(*(x.reshape(-1, *x.shape[2:]) for x in dkv))
            dkv = [x if x is None else _by_batch(kv, [x[:, None]])[0] for x in drows]
            dweights = rounded(dweights, weights)
        return dq, dkv, None if sink is None else sink_gradient(sink, whole), dweights

    done = pipelined_over_heads(
        call.exchange,
        parts[::-1],  # the part with most heads returns first
        work,
        send=lambda part: movement.send_cotangents(gathered, Outputs(*part[-1])),
        give_back=lambda outputs: movement.give_back_gradients(gathered, *outputs[:2]),
    )[::-1]
    dq, dkv = _join([returned for _, returned in done], 1)
    dsink, dweights = _join([outputs[2] for outputs, _ in done], 0), done[0][0][3]
    dk, dv = dkv if call.expansion is None else (rounded(dkv, received[0][2]), None)
    return Operands(dq, dk, dv, dsink, dweights), None


gather_attend.defvjp(_forward, _backward)


# ---- Parts of heads: rows of one part move beside the computation of another.
#
# Heads are independent, so the results are those of one part, bit for bit.


def parts_of_heads(call: Call, operands: Operands) -> list[Operands]:
    """Returns the parts of rows `[T, N, H]`, in the order of the forward pass.

    The last one has most heads. Splitting needs exchanges in two calls and at least two KV heads.
    """
    q, k, v, sink, weights, _ = operands
    if v is None or k.shape[1] < 2 or call.pick_block:
        return [operands]
    if not moves_beside_work(call.exchange.implementation):
        return [operands]
    num_keys, half = k.shape[1], k.shape[1] // 2
    per_key, parts = q.shape[1] // num_keys, []
    for i, j in ((0, half), (half, num_keys)):
        heads = slice(per_key * i, per_key * j)
        part = q[:, heads], k[:, i:j], v[:, i:j], None if sink is None else sink[heads]
        parts.append(Operands(*part, weights))
    return parts


def _join(parts: Sequence[Any], axis: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *parts)


def pipelined_over_heads(
    options: CollectiveOptions,
    parts: Sequence[Any],
    work: Callable[[Any, Any], Any],
    *,
    send: Callable[[Any], PendingExchange],
    give_back: Callable[[Any], PendingExchange],
) -> list[tuple[Any, Any]]:
    """Computes one part after another, while rows of the next come and those of the last return.

    `send` is what other ranks receive of a part before its computation, and `give_back` what they
    receive of its outputs. `work` computes these from the arrays of the part and what `send` has
    read. Returns the outputs of each part, and what `give_back` has read.
    """
    all_outputs, all_returned = [], []
    received = send(parts[0]).completed(options)
    for i, part in enumerate(parts):
        inputs, coming, going, came, went = (part, received), None, None, None, None
        following = send(parts[i + 1]) if i + 1 < len(parts) else None
        back = give_back(all_outputs[-1]) if all_outputs else None
        if following is not None and following.moved is not None:
            arrays = [argument.arrays for argument in following.moved]
            # That exchange starts after the inputs of this part have come.
            arrays, inputs = jax.lax.optimization_barrier((arrays, inputs))
            moved = [x._replace(arrays=y) for x, y in zip(following.moved, arrays, strict=True)]
            coming, inputs = start(options, moved, inputs)
        if back is not None and back.moved is not None:
            going, inputs = start(options, back.moved, inputs)
        outputs = work(*inputs)
        if coming is not None:
            came, outputs = coming.done(outputs)
        if going is not None:
            went, outputs = going.done(outputs)
        if following is not None:
            received = following.read(came)
        if back is not None:
            all_returned.append(back.read(went))
        all_outputs.append(outputs)
    all_returned.append(give_back(all_outputs[-1]).completed(options))
    return list(zip(all_outputs, all_returned, strict=True))


# ---- The rows that a rank attends, `[b, rows, ...]`. All keys of a query are on its rank.


def only_of_own_picks(
    exchange: CollectiveOptions, picked: PickedRows, block: int, outputs: Any
) -> Any:
    """Returns outputs; all ranks fail if picks of some rank are not those of its queries.

    By an exchange of its own, so that keys may move before the picks are known.
    """
    fault = jnp.where(picked.rows.are_picks(picked.picks, block), 0, WRONG_MASK).astype(jnp.int32)
    fingerprint = order_fingerprint(fault, jax.lax.axis_index(exchange.axis_name))
    return only_if_right(confirmed(exchange, fingerprint), outputs)


def rows_to_expand(latents: Any, ranges: MaskRanges) -> list[Any]:
    """Returns latent rows, without those that no query reads."""
    is_key = are_covered(*ranges[:2], latents[0].shape[1])[:, :, None]
    rows = [jnp.where(is_key, x[:, :, 0], UNUSED_ROW) for x in latents]
    return [x.reshape(-1, x.shape[2]) for x in rows]


def _by_batch(latents: Any, rows: Sequence[Any]) -> list[Any]:
    """Returns arrays with one row for each latent row, `[b, rows, ...]`."""
    return [x.reshape(*latents[0].shape[:2], *x.shape[1:]) for x in rows]


def row_passes(call: Call, block_rows: int, q, k, dkv_dtype: Any = None) -> PassOptions:
    """Returns the options for arrays of one rank; dk and dv without a dtype are sums."""
    (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
    gradient_dtypes = q.dtype, *[dkv_dtype or sum_dtype(q.dtype)] * 2
    blocks = rank_blocks(T, S, N, K, rows=block_rows)
    options = {"out_dtype": q.dtype, "gradient_dtypes": gradient_dtypes}
    if call.pick_block:
        value_size = 0 if call.expansion is None else call.expansion.value_size
        options |= {"pick_block": call.pick_block, "value_size": value_size}
    return pass_options(q, k, **call.softmax, **blocks, **options)
