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
from jaxtyping import Array, Float

from jax_cp_dispatch._arrays import are_covered, sum_dtype
from jax_cp_dispatch._dispatch import Argument, move, start
from jax_cp_dispatch._ranks.implementations import moves_beside_work
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.local.local_attention import attend_ranges, range_gradients
from jax_cp_dispatch.attention.local.passes import forbid_second_derivative, sink_gradient
from jax_cp_dispatch.attention.local.ranges import (
    PassOptions,
    SoftmaxGradients,
    pass_options,
    ranges_of_rows,
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
from jax_cp_dispatch.masks import MaskRanges


class Exchange(NamedTuple):
    """One exchange: what moves, and how to read what comes.

    Attributes:
      moved: what `move` takes; of several parts, a list of `Argument`s. None: nothing moves.
      read: from what came, or from None, to the arrays of the receiver.
    """

    moved: Any
    read: Callable[[Any], Any]

    def completed(self, move: Callable[[Any], Any]) -> Any:
        return self.read(None if self.moved is None else move(self.moved))


class Movement(abc.ABC):
    """What moves: four exchanges, of which two are the transposes of the others. Hashable.

    `arrays` are those of the call that have no derivative. The arrays that a rank attends are `[b,
    rows, ...]`; those of the caller may have another shape.
    """

    call: Call
    block_rows: int  # of a query block's matrix

    @abc.abstractmethod
    def ranges(self, arrays: Any) -> MaskRanges:
        """Returns what the attended rows see."""

    @abc.abstractmethod
    def send(self, arrays: Any, part: Operands) -> Exchange:
        """Queries, keys and values go to the ranks that attend them: (q, kv)."""

    @abc.abstractmethod
    def give_back(self, arrays: Any, out: Array, lse: Array) -> Exchange:
        """The output returns, with its lse if asked for: (out, lse), of the caller's rows."""

    @abc.abstractmethod
    def send_cotangents(self, arrays: Any, cotangents: Outputs) -> Exchange:
        """The transpose of `give_back`."""

    @abc.abstractmethod
    def give_back_gradients(self, arrays: Any, dq: Array, dkv: Any) -> Exchange:
        """The transpose of `send`: (dq, dkv), of the caller's rows."""

    def move(self, moved: Any) -> list[Any]:
        return move(self.call.exchange, moved)

    def parts(self, operands: Operands) -> list[Operands]:
        """Returns the parts of the heads that are computed one after another."""
        return [operands]

    def dkv_dtype(self, dtype: Any) -> Any:
        """Returns the dtype of gradients of keys, for an output of `dtype`; None: of sums."""
        return None

    def checked(self, arrays: Any, out: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the output, or NaN, where no exchange of the plan has checked the tokens."""
        return out

    def own_sink(self, sink: Any) -> Any:
        """Returns the sink of the heads that this rank computes."""
        return sink

    def whole_sink(self, dsink: Any, sink: Any) -> Any:
        """The transpose of `own_sink`."""
        return dsink

    def largest(self, max_logits: Float[Array, " n"]) -> Float[Array, " N"]:
        """Returns the largest logits of all heads, over all ranks."""
        return jax.lax.pmax(max_logits, self.call.exchange.axis_name)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_attend(movement: Movement, operands: Operands, arrays: Any) -> Outputs:
    """Computes attention of this rank's rows."""
    return _forward(movement, operands, arrays)[0]


def _forward(movement: Movement, operands: Operands, arrays: Any):
    call = movement.call
    operands = forbid_second_derivative(call.op, operands)
    parts, ranges = movement.parts(operands), movement.ranges(arrays)

    def work(part: Operands, came: tuple[Any, Any]):
        q, kv = came
        keys = kv
        if call.expansion is not None:
            keys = _by_batch(kv, call.expansion(part.weights, _rows_to_expand(kv, ranges)))
        sink = None if part.sink is None else movement.own_sink(part.sink)
        out, lse, largest = attend_rows(call, movement.block_rows, q, keys, ranges, sink)
        return (q, kv, ranges), *named_context((movement.checked(arrays, out), lse)), largest

    done = pipelined_over_heads(
        call.exchange,
        movement.move,
        parts,
        work,
        send=partial(movement.send, arrays),
        give_back=lambda outputs: movement.give_back(arrays, *outputs[1:3]),
    )
    received, out, lse, largest = zip(*(outputs for outputs, _ in done), strict=True)
    outputs = Outputs(*_join([returned for _, returned in done], 1))
    if call.return_max_logits:
        outputs = outputs._replace(max_logits=movement.largest(_join(largest, 0)))
    return outputs, (received, out, lse, operands.sink, operands.weights, arrays)


def _backward(movement: Movement, residuals, cotangents: Outputs):
    received, out, lse, sink, weights, arrays = residuals
    call, op = movement.call, movement.call.op
    given = [x for x in forbid_second_derivative(op, cotangents)[:2] if x is not None]
    ends = list(itertools.accumulate(q.shape[2] for q, *_ in received))[:-1]
    split = lambda x, axis: jnp.split(x, ends, axis) if ends else [x]
    sinks = [None] * len(received) if sink is None else split(sink, 0)
    pieces = zip(*(split(x, 1) for x in given), strict=True)
    parts = list(zip(received, out, lse, sinks, pieces, strict=True))

    def work(part, came: Outputs):
        (q, kv, ranges), out, lse, sink, _ = part
        whole = softmax_gradients(op, out, lse, came)
        dtype, dweights, dsink = movement.dkv_dtype(q.dtype), None, None
        backward = partial(row_gradients, call, movement.block_rows, q)
        if call.expansion is None:
            dq, *dkv = backward(kv, ranges, whole, dtype)
        else:
            rows = _rows_to_expand(kv, ranges)
            expanded, transpose = call.expansion.with_transpose(weights, rows)
            dq, *dkv = backward(_by_batch(kv, expanded), ranges, whole, dtype)
            dweights, drows = transpose(*(x.reshape(-1, *x.shape[2:]) for x in dkv))
            dkv = [x if x is None else _by_batch(kv, [x[:, None]])[0] for x in drows]
            dweights = rounded(dweights, weights)
        if sink is not None:
            dsink = movement.whole_sink(sink_gradient(movement.own_sink(sink), whole), sink)
        return dq, dkv, dsink, dweights

    done = pipelined_over_heads(
        call.exchange,
        movement.move,
        parts[::-1],  # the part with most heads returns first
        work,
        send=lambda part: movement.send_cotangents(arrays, Outputs(*part[-1])),
        give_back=lambda outputs: movement.give_back_gradients(arrays, *outputs[:2]),
    )[::-1]
    dq, dkv = _join([returned for _, returned in done], 1)
    dsink, dweights = _join([outputs[2] for outputs, _ in done], 0), done[0][0][3]
    dk, dv = dkv if call.expansion is None else (rounded(dkv, received[0][1]), None)
    return Operands(dq, dk, dv, dsink, dweights), None


gather_attend.defvjp(_forward, _backward)


# ---- Parts of heads: rows of one part move beside the computation of another.
#
# Heads are independent, so the results are those of one part, bit for bit.


def parts_of_heads(call: Call, operands: Operands) -> list[Operands]:
    """Returns the parts of rows `[T, N, H]`, in the order of the forward pass.

    The last one has most heads. Splitting needs exchanges in two calls and at least two KV heads.
    """
    q, k, v, sink, weights = operands
    if v is None or k.shape[1] < 2 or not moves_beside_work(call.exchange.implementation):
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
    move: Callable[[Any], list[Any]],
    parts: Sequence[Any],
    work: Callable[[Any, Any], Any],
    *,
    send: Callable[[Any], Exchange],
    give_back: Callable[[Any], Exchange],
) -> list[tuple[Any, Any]]:
    """Computes one part after another, while rows of the next come and those of the last return.

    Args:
      options: of the exchanges.
      move: moves in one call.
      parts: of each part, a pytree of arrays that are here.
      work: computes the outputs of a part, from its arrays and what `send` has read.
      send: what other ranks receive of a part, before its computation.
      give_back: what other ranks receive of its outputs.
    Returns:
      The outputs of each part, and what `give_back` has read.
    """
    all_outputs, all_returned = [], []
    received = send(parts[0]).completed(move)
    for i, part in enumerate(parts):
        inputs, coming, going = (part, received), None, None
        following = send(parts[i + 1]) if i + 1 < len(parts) else None
        if following is not None and following.moved is not None:
            arguments, inputs = _after(following.moved, inputs)
            coming, inputs = start(options, arguments, inputs)
        back = give_back(all_outputs[-1]) if all_outputs else None
        if back is not None and back.moved is not None:
            going, inputs = start(options, back.moved, inputs)
        outputs = work(*inputs)
        came = went = None
        if coming is not None:
            came, outputs = coming.done(outputs)
        if going is not None:
            went, outputs = going.done(outputs)
        if following is not None:
            received = following.read(came)
        if back is not None:
            all_returned.append(back.read(went))
        all_outputs.append(outputs)
    all_returned.append(give_back(all_outputs[-1]).completed(move))
    return list(zip(all_outputs, all_returned, strict=True))


def _after(arguments: list[Argument], inputs: Any) -> tuple[list[Argument], Any]:
    """Returns the same; the arguments depend on the inputs, which have then come."""
    arrays = [argument.arrays for argument in arguments]
    arrays, inputs = jax.lax.optimization_barrier((arrays, inputs))
    replaced = [x._replace(arrays=y) for x, y in zip(arguments, arrays, strict=True)]
    return replaced, inputs


# ---- The rows that a rank attends, `[b, rows, ...]`. All keys of a query are on its rank.


def _rows_to_expand(latents: Any, ranges: MaskRanges) -> list[Any]:
    """Returns latent rows, without those that no query reads."""
    is_key = are_covered(*ranges[:2], latents[0].shape[1])[:, :, None]
    rows = [jnp.where(is_key, x[:, :, 0], UNUSED_ROW) for x in latents]
    return [x.reshape(-1, x.shape[2]) for x in rows]


def _by_batch(latents: Any, rows: Sequence[Any]) -> list[Any]:
    """Returns arrays with one row for each latent row, `[b, rows, ...]`."""
    return [x.reshape(*latents[0].shape[:2], *x.shape[1:]) for x in rows]


def attend_rows(
    call: Call, block_rows: int, q: Array, kv: Any, ranges: MaskRanges, sink=None
) -> Any:
    """Returns the output in the dtype of q, its lse, and the largest logits or None."""
    rows = ranges_of_rows(ranges, q.shape[:2])
    found = attend_ranges(_passes(call, block_rows, q, kv[0]), q, kv, rows, sink)
    return *found, *[None] * (3 - len(found))


def row_gradients(
    call: Call,
    block_rows: int,
    q: Array,
    kv: Any,
    ranges: MaskRanges,
    whole: SoftmaxGradients,
    dkv_dtype: Any = None,
):
    """Returns dq in the dtype of q, and dk and dv in `dkv_dtype`; None is that of sums."""
    passes = _passes(call, block_rows, q, kv[0], dkv_dtype)
    passes = dataclasses.replace(passes, return_max_logits=False)
    return range_gradients(passes, q, kv, ranges_of_rows(ranges, q.shape[:2]), whole)


def _passes(call: Call, block_rows: int, q, k, dkv_dtype: Any = None) -> PassOptions:
    (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
    gradient_dtypes = q.dtype, *[dkv_dtype or sum_dtype(q.dtype)] * 2
    blocks = rank_blocks(T, S, N, K, rows=block_rows)
    dtypes = {"out_dtype": q.dtype, "gradient_dtypes": gradient_dtypes}
    return pass_options(q, k, **call.softmax, **blocks, **dtypes)
