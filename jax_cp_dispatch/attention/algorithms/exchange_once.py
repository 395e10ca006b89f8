"""Attention with one exchange each way: rows move, each rank attends, and results return.

Algorithms that exchange once share this derivative. They differ in their `Movement`.
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

from jax_cp_dispatch._arrays import are_covered
from jax_cp_dispatch._dispatch import Argument, move, start
from jax_cp_dispatch._ranks.implementations import moves_beside_work
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.local.blockwise import SoftmaxGradients
from jax_cp_dispatch.attention.local.local_attention import attend_ranges, range_gradients
from jax_cp_dispatch.attention.local.options import PassOptions, pass_options, rank_blocks
from jax_cp_dispatch.attention.local.passes import forbid_second_derivative, sink_gradient
from jax_cp_dispatch.attention.local.ranges import accumulator
from jax_cp_dispatch.attention.operands import (
    UNUSED_ROW,
    AttentionOptions,
    Operands,
    Outputs,
    rounded,
    softmax_gradients,
)
from jax_cp_dispatch.masks import MaskRanges

# ---- Attention in parts of heads: rows of one part move beside the computation of another.
#
# Heads are independent, so the results are those of one part, bit for bit. Two parts need an
# exchange
# in two calls and two KV heads. With one of both, everything is one part.


class Heads(NamedTuple):
    """The heads of one part.

    Attributes:
      of_queries, of_keys: where they are among all.
    """

    of_queries: slice
    of_keys: slice

    def operands(self, operands: Operands) -> Operands:
        """Returns this part's queries, keys, values and sink, of rows `[T, N, H]`."""
        q, k, v, sink, weights = operands
        if self == ALL_HEADS:
            return operands
        k, v = (x[:, self.of_keys] for x in (k, v))
        sink = None if sink is None else sink[self.of_queries]
        return Operands(q[:, self.of_queries], k, v, sink, weights)


ALL_HEADS = Heads(slice(None), slice(None))


def parts_of_heads(options: AttentionOptions, operands: Operands) -> list[Heads]:
    """Returns the parts, in the order of the forward pass. The last one has most heads."""
    q, k, v, *_ = operands
    if v is None or k.shape[1] < 2 or not moves_beside_work(options.exchange.implementation):
        return [ALL_HEADS]
    num_keys, half = k.shape[1], k.shape[1] // 2
    per_key = q.shape[1] // num_keys
    cuts = (0, half), (half, num_keys)
    return [Heads(slice(per_key * i, per_key * j), slice(i, j)) for i, j in cuts]


def join(parts: Sequence[Any], axis: int) -> Any:
    """Concatenates the arrays of all parts, pytrees of one structure, along the axis of heads."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *parts)


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


class Part(NamedTuple):
    """One part after its computation.

    Attributes:
      outputs: of the computation.
      returned: what `give_back` has read.
    """

    outputs: Any
    returned: Any = None


def in_parts(
    options: CollectiveOptions,
    move: Callable[[Any], list[Any]],
    parts: Sequence[Any],
    work: Callable[[Any, Any], Any],
    *,
    send: Callable[[Any], Exchange],
    give_back: Callable[[Any], Exchange],
) -> list[Part]:
    """Computes one part after another, while rows of the next come and those of the last return.

    Args:
      options: of the exchanges.
      move: moves in one call.
      parts: of each part, a pytree of arrays that are here.
      work: computes the outputs of a part, from its arrays and what `send` has read.
      send: what other ranks receive of a part, before its computation.
      give_back: what other ranks receive of its outputs.
    """
    done: list[Part] = []
    received = send(parts[0]).completed(move)
    for i, part in enumerate(parts):
        inputs, coming, going = (part, received), None, None
        following = send(parts[i + 1]) if i + 1 < len(parts) else None
        if following is not None and following.moved is not None:
            arguments, inputs = _after(following.moved, inputs)
            coming, inputs = start(options, arguments, inputs)
        back = give_back(done[-1].outputs) if done else None
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
            done[-1] = done[-1]._replace(returned=back.read(went))
        done.append(Part(outputs))
    returned = give_back(done[-1].outputs).completed(move)
    return [*done[:-1], done[-1]._replace(returned=returned)]


def _after(arguments: list[Argument], inputs: Any) -> tuple[list[Argument], Any]:
    """Returns the same; the arguments depend on the inputs, which have then come."""
    arrays = [argument.arrays for argument in arguments]
    arrays, inputs = jax.lax.optimization_barrier((arrays, inputs))
    replaced = [x._replace(arrays=y) for x, y in zip(arguments, arrays, strict=True)]
    return replaced, inputs


class Received(NamedTuple):
    """What a rank attends, `[b, rows, ...]`.

    Attributes:
      q: queries.
      kv: keys and values, or arrays of latent rows.
      ranges: of rows of keys that each query sees, and of queries that see each key.
    """

    q: Any
    kv: Any
    ranges: MaskRanges

    def rows_to_expand(self) -> list[Any]:
        """Returns latent rows, without those that no query reads."""
        is_key = are_covered(*self.ranges[:2], self.kv[0].shape[1])[:, :, None]
        rows = [jnp.where(is_key, x[:, :, 0], UNUSED_ROW) for x in self.kv]
        return [x.reshape(-1, x.shape[2]) for x in rows]

    def by_batch(self, x: Any) -> Any:
        """Returns expanded rows, or what has one row for each, `[b, rows, ...]`."""
        return x.reshape(*self.kv[0].shape[:2], *x.shape[1:])


class Movement(abc.ABC):
    """What moves: four exchanges, of which two are the transposes of the others. Hashable.

    `arrays` are those of the call that have no derivative. The arrays that a rank attends are `[b,
    rows, ...]`; those of the caller may have another shape.
    """

    options: AttentionOptions
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
        """Executes an exchange."""
        return move(self.options.exchange, moved)

    def parts(self, operands: Operands) -> list[Heads]:
        """Returns the parts of heads that are computed one after another."""
        return [ALL_HEADS]

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

    def largest(self, max_logits: Float[Array, " n"], num_heads: int) -> Float[Array, " N"]:
        """Returns the largest logits of all heads, over all ranks."""
        return jax.lax.pmax(max_logits, self.options.exchange.axis_name)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchange_once(movement: Movement, operands: Operands, arrays: Any) -> Outputs:
    """Computes attention of this rank's rows."""
    return _forward(movement, operands, arrays)[0]


def _forward(movement: Movement, operands: Operands, arrays: Any):
    options = movement.options
    operands = forbid_second_derivative(options.op, operands)
    heads, ranges = movement.parts(operands), movement.ranges(arrays)

    def attend(part: Operands, came: tuple[Any, Any]):
        received = Received(came[0], came[1], ranges)
        out, lse, largest = _attend(movement, received, part)
        return received, *named_context((movement.checked(arrays, out), lse)), largest

    done = in_parts(
        options.exchange,
        movement.move,
        [part.operands(operands) for part in heads],
        attend,
        send=partial(movement.send, arrays),
        give_back=lambda outputs: movement.give_back(arrays, *outputs[1:3]),
    )
    received, out, lse, largest = zip(*(part.outputs for part in done), strict=True)
    outputs = Outputs(*join([part.returned for part in done], 1))
    if options.return_max_logits:
        most = movement.largest(join(largest, 0), operands.q.shape[-2])
        outputs = outputs._replace(max_logits=most)
    return outputs, (received, out, lse, operands.sink, operands.weights, arrays)


def _backward(movement: Movement, residuals, cotangents: Outputs):
    received, out, lse, sink, weights, arrays = residuals
    options, op = movement.options, movement.options.op
    given = [x for x in forbid_second_derivative(op, cotangents)[:2] if x is not None]
    ends = list(itertools.accumulate(part.q.shape[2] for part in received))[:-1]
    split = [jnp.split(x, ends, 1) if ends else [x] for x in given]
    sinks = [None] * len(received) if sink is None else jnp.split(sink, ends)
    parts = list(zip(received, out, lse, sinks, zip(*split, strict=True), strict=True))

    def gradients(part, came: Outputs):
        rows, out, lse, sink, _ = part
        whole = softmax_gradients(op, out, lse, came)
        dq, dkv, dweights = _gradients(movement, rows, weights, whole)
        dsink = None
        if sink is not None:
            dsink = movement.whole_sink(sink_gradient(movement.own_sink(sink), whole), sink)
        return dq, dkv, dsink, dweights

    done = in_parts(
        options.exchange,
        movement.move,
        parts[::-1],  # the part with most heads returns first
        gradients,
        send=lambda part: movement.send_cotangents(arrays, Outputs(*part[-1])),
        give_back=lambda outputs: movement.give_back_gradients(arrays, *outputs[:2]),
    )[::-1]
    dq, dkv = join([part.returned for part in done], 1)
    dsink = join([part.outputs[2] for part in done], 0)
    dweights = done[0].outputs[3]
    if dweights is None:
        dk, dv = dkv
        return Operands(dq, dk, dv, dsink), None
    return Operands(dq, rounded(dkv, received[0].kv), None, dsink, dweights), None


exchange_once.defvjp(_forward, _backward)


def _attend(movement: Movement, received: Received, part: Operands):
    """Returns the output in the dtype of q, its lse, and the largest logits here or None.

    All are final: all keys of a query are on its rank.
    """
    q, kv, ranges = received
    if movement.options.expansion is not None:
        rows = received.rows_to_expand()
        kv = list(map(received.by_batch, movement.options.expansion(part.weights, rows)))
    sink = None if part.sink is None else movement.own_sink(part.sink)
    return attend_rows(movement.options, movement.block_rows, q, kv, ranges, sink)


def _gradients(movement: Movement, received: Received, weights: Any, whole: SoftmaxGradients):
    """Returns the gradients of queries in their dtype, those of rows, and of the weights.

    Rows that several ranks sum are not yet rounded.
    """
    q, kv, ranges = received
    options, dtype = movement.options, movement.dkv_dtype(q.dtype)
    backward = partial(row_gradients, options, movement.block_rows, q)
    if options.expansion is None:
        dq, *dkv = backward(kv, ranges, whole, dtype)
        return dq, dkv, None
    expanded, transpose = options.expansion.with_transpose(weights, received.rows_to_expand())
    kv = list(map(received.by_batch, expanded))
    dq, *dkv = backward(kv, ranges, whole, dtype)
    dweights, drows = transpose(*(x.reshape(-1, *x.shape[2:]) for x in dkv))
    drows = [None if x is None else received.by_batch(x[:, None]) for x in drows]
    return dq, drows, rounded(dweights, weights)


def attend_rows(
    options: AttentionOptions, block_rows: int, q: Array, kv: Any, ranges: MaskRanges, sink=None
) -> Any:
    """Returns the output of rows in the dtype of q, its lse, and the largest logits or None."""
    found = attend_ranges(_passes(options, block_rows, q, kv[0]), q, kv, ranges, sink)
    return *found, *[None] * (3 - len(found))


def row_gradients(
    options: AttentionOptions,
    block_rows: int,
    q: Array,
    kv: Any,
    ranges: MaskRanges,
    whole: SoftmaxGradients,
    dkv_dtype: Any = None,
):
    """Returns dq in the dtype of q, and dk and dv in `dkv_dtype`; None is that of sums."""
    options = dataclasses.replace(options, return_max_logits=False)
    passes = _passes(options, block_rows, q, kv[0], dkv_dtype)
    return range_gradients(passes, q, kv, ranges, whole)


def _passes(options: AttentionOptions, block_rows: int, q, k, dkv_dtype: Any = None) -> PassOptions:
    (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
    sum_dtype = accumulator(q)
    return pass_options(
        *(q, k),
        scale=options.scale,
        logit_soft_cap=options.logit_soft_cap,
        **rank_blocks(T, S, N, K, rows=block_rows),
        return_max_logits=options.return_max_logits,
        out_dtype=q.dtype,
        gradient_dtypes=(q.dtype, *[dkv_dtype or sum_dtype] * 2),
    )
