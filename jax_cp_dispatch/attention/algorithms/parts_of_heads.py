"""Attention in parts of heads: rows of one part move beside the computation of another.

Heads are independent, so the results are those of one part, bit for bit. Two parts need an exchange
in two calls and two KV heads. With one of both, everything is one part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cp_dispatch._dispatch import Argument, start
from jax_cp_dispatch._ranks.implementations import moves_beside_work
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.operands import Operands


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
