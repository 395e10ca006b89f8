"""Attention in parts of heads: rows of one part move beside the computation of another.

Heads are independent, so the results are those of one part, bit for bit. Two parts need an exchange
in two calls and two KV heads. With one of both, everything is one part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cp_dispatch._dispatch import Argument, move, start
from jax_cp_dispatch._ranks.implementations import moves_beside_work
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.attention.local.backward import SoftmaxGradients
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.options import AttentionOptions


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
        if v is None:
            return operands
        k, v = (x[:, self.of_keys] for x in (k, v))
        sink = None if sink is None else sink[self.of_queries]
        return Operands(q[:, self.of_queries], k, v, sink, weights)


def parts_of_heads(options: AttentionOptions, operands: Operands) -> list[Heads]:
    """Returns the parts, in the order of the forward pass. The last one has most heads."""
    q, k, v, *_ = operands
    if v is None or k.shape[1] < 2 or not moves_beside_work(options.exchange.implementation):
        return [Heads(slice(None), slice(None))]
    num_keys, half = k.shape[1], k.shape[1] // 2
    per_key = q.shape[1] // num_keys
    cuts = (0, half), (half, num_keys)
    return [Heads(slice(per_key * i, per_key * j), slice(i, j)) for i, j in cuts]


def cut_softmax(whole: SoftmaxGradients, num_heads: Sequence[int]) -> list[SoftmaxGradients]:
    """Cuts the softmax of all heads into parts of some each."""
    ends = list(itertools.accumulate(num_heads))[:-1]
    out, lse, dout = map(jnp.split, whole[:3], [ends] * 3, (2, 1, 2))
    dlse = [None] * len(num_heads) if whole.dlse is None else jnp.split(whole.dlse, ends, 1)
    return [SoftmaxGradients(*part) for part in zip(out, lse, dout, dlse, strict=True)]


def join(parts: Sequence[Any], axis: int) -> Any:
    """Concatenates the arrays of all parts, pytrees of one structure, along the axis of heads."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *parts)


class Part(NamedTuple):
    """One part after its computation.

    Attributes:
      outputs: of the computation.
      returned: what came of the outputs of other ranks; one entry for each argument.
    """

    outputs: Any
    returned: list[Any]


def in_parts(
    options: CollectiveOptions,
    parts: Sequence[Any],
    work: Callable[[Any, list[Any]], Any],
    *,
    send: Callable[[Any], list[Argument]] | None = None,
    give_back: Callable[[Any], list[Argument]] | None = None,
) -> list[Part]:
    """Computes one part after another, while rows of the next come and those of the last return.

    Args:
      options: of the exchanges.
      parts: of each part, a pytree of arrays that are here.
      work: computes the outputs of a part, from its arrays and what it has received.
      send: what other ranks receive of a part, before its computation.
      give_back: what other ranks receive of its outputs.
    """
    received: list[list[Any]] = [[] for _ in parts]
    done: list[Part] = []
    if send is not None:
        received[0] = move(options, send(parts[0]))
    for i, part in enumerate(parts):
        inputs, coming, going = (part, received[i]), None, None
        if send is not None and i + 1 < len(parts):
            arguments, inputs = _after(send(parts[i + 1]), inputs)
            coming, inputs = start(options, arguments, inputs)
        if give_back is not None and i > 0:
            going, inputs = start(options, give_back(done[-1].outputs), inputs)
        outputs = work(*inputs)
        if coming is not None:
            received[i + 1], outputs = coming.done(outputs)
        if going is not None:
            returned, outputs = going.done(outputs)
            done[-1] = done[-1]._replace(returned=returned)
        done.append(Part(outputs, []))
    if give_back is not None:
        done[-1] = done[-1]._replace(returned=move(options, give_back(done[-1].outputs)))
    return done


def _after(arguments: list[Argument], inputs: Any) -> tuple[list[Argument], Any]:
    """Returns the same; the arguments depend on the inputs, which have then come."""
    arrays = [argument.arrays for argument in arguments]
    arrays, inputs = jax.lax.optimization_barrier((arrays, inputs))
    replaced = [x._replace(arrays=y) for x, y in zip(arguments, arrays, strict=True)]
    return replaced, inputs
