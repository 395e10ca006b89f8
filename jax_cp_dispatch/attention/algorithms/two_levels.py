"""Heads shared over the last mesh axis, and another algorithm over the axes before it (USP)."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_cp_dispatch._ranks.varying import vary_alike, vary_like
from jax_cp_dispatch._residuals import named_context_received
from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, Call
from jax_cp_dispatch.attention.algorithms.head_exchange import HeadExchange, repeat_heads
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.cost import Hardware, Workload
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.order import gather_sequence
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.global_call.kv_heads import kv_copies
from jax_cp_dispatch.masks.mask import zigzag_order


class TwoLevels(NamedTuple):
    """The two parts of a call; static.

    The ranks of the last axis hold consecutive parts of the sequence, in zigzag order consecutive
    blocks from both ends. So together they are one rank of the axes before it, with all their
    tokens, in the same layout.

    Attributes:
      outer: the algorithm over the axes before the last.
      options: of the call.
    """

    outer: Algorithm
    options: AttentionOptions

    @property
    def inner_options(self) -> Any:
        """Of the exchanges between the ranks that share the heads."""
        names = self.options.exchange.axis_names[-1:]
        return dataclasses.replace(self.options.exchange, axis_names=names)

    def outer_options(self, num_outer: int) -> AttentionOptions:
        """Of the part of the outer algorithm."""
        names, order = self.options.exchange.axis_names[:-1], self.options.order
        exchange = dataclasses.replace(self.options.exchange, axis_names=names)
        if order.layout == "zigzag":
            order = zigzag_order(num_outer)
        return dataclasses.replace(self.options, exchange=exchange, order=order)

    def why_not(self, call: Call) -> str | None:
        """Returns why the outer algorithm cannot serve its part; inner ranks divide the heads."""
        *outer, inner = call.axis_sizes
        options = self.outer_options(math.prod(outer))
        options = dataclasses.replace(options, order=call.options.order)  # as the caller names it
        part = Call(options, tuple(outer), call.num_heads // inner, call.mask)
        reason = self.outer.why_not(part)
        return reason and f"{reason} Or pass Ulysses(outer=Zigzag())."


@partial(jax.jit, static_argnums=0)  # equal calls of a program are traced and lowered once
def attend_two_levels(levels: TwoLevels, operands: Operands, packed: PackedMask) -> Outputs:
    """Computes attention of this rank's rows; the arguments are checked."""
    options, T = levels.options, operands.q.shape[1]
    exchange, inner = options.exchange, levels.inner_options
    num_inner = lax.axis_size(inner.axis_name)
    num_outer = lax.axis_size(exchange.axis_name) // num_inner
    layout = options.order.layout
    if layout == "zigzag" and T % 2 and num_outer > 1 and num_inner > 1:
        raise ValueError(
            f"{options.op}: a rank holds {T} tokens in {options.order}, but two levels need an "
            "even number. Pad the tokens (segment 0 is padding) to a multiple of two per rank."
        )
    part = operands.varying(exchange)
    heads = HeadExchange(inner, num_inner, layout)
    if options.expansion is None:
        copies = kv_copies(part.q.shape[2], part.k.shape[2], num_inner)
        kv: Any = [repeat_heads(x, copies) for x in part.moved]
        q, k, v = named_context_received(heads.to_heads([part.q, *kv]))
    else:
        (q,), k, v = heads.to_heads([part.q]), tuple(heads.to_all(part.k)), None
        q, k = named_context_received((q, k))
    sink = None if part.sink is None else _own(part.sink, num_inner, inner.axis_name)
    part = part._replace(q=q, k=k, v=v, sink=sink)
    packed = _gathered(levels, packed, num_inner)
    outputs = levels.outer.attend(levels.outer_options(num_outer), part, packed, None)
    lses = [] if outputs.lse is None else [outputs.lse[..., None]]
    out, *lses = heads.to_tokens([outputs.out, *lses])
    largest = outputs.max_logits
    if largest is not None:
        largest = _largest(lax.stop_gradient(largest), num_inner, inner.axis_name)
    return Outputs(out, lses[0][..., 0] if lses else None, largest)


def _gathered(levels: TwoLevels, packed: PackedMask, num_inner: int) -> PackedMask:
    """Returns the columns of all ranks that share the heads, in the order of their blocks."""
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, packed))
    if num_inner == 1 or not leaves:
        return packed
    names = levels.options.exchange.axis_names
    packed = tree.unflatten(vary_alike(leaves, also=names))
    packed = gather_sequence(levels.inner_options, packed, num_inner)
    if levels.options.order.layout != "zigzag":
        return packed
    order = zigzag_permutation(jax.tree.leaves(packed)[0].shape[1], num_inner, inverse=True)
    return jax.tree.map(lambda x: x[:, order], packed)


def _own(sink: Float[Array, " N"], num_inner: int, axis_name: Any) -> Float[Array, " share"]:
    size = sink.shape[0] // num_inner
    return lax.dynamic_slice_in_dim(sink, lax.axis_index(axis_name) * size, size)


def _largest(share: Float[Array, " share"], num_inner: int, axis_name: Any) -> Float[Array, " N"]:
    """Returns the numbers of all heads, given those of this rank's share."""
    size = share.shape[0]
    (none,) = vary_like([jnp.full(num_inner * size, -jnp.inf, share.dtype)], share)
    among_all = lax.dynamic_update_slice_in_dim(none, share, lax.axis_index(axis_name) * size, 0)
    return lax.pmax(among_all, axis_name)


def outer_workload(workload: Workload, hardware: Hardware) -> tuple[Workload, Hardware, int]:
    """Returns what the outer algorithm computes between nodes, on which links, and ranks a node.

    The ranks of a node share the heads. Those with the same share, one on each node, are the ranks
    of the outer algorithm; the others use the NICs of their node at the same time.
    """
    size = hardware.node_size(workload.num_ranks)
    copies = kv_copies(workload.num_heads, workload.num_kv_heads, size)
    part = dataclasses.replace(
        workload,
        num_ranks=workload.num_ranks // size,
        tokens_per_rank=workload.tokens_per_rank * size,
        num_heads=workload.num_heads // size,
        num_kv_heads=workload.num_kv_heads * copies // size,
        expand_flops=workload.expand_flops / size,
    )
    rail = hardware.rail_bandwidth * min(1.0, hardware.rails / size)
    links = dataclasses.replace(hardware, ranks_per_node=1, rails=1, rail_bandwidth=rail)
    return part, links, size
