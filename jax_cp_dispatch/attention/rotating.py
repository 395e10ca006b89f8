"""Attention of resident queries over keys and values that rotate through the ranks.

One loop for ring, zigzag and Hamilton attention, which differ in the schedule of chunks and in the
placement of tokens. Each step issues the exchange for the next one, attends what is held, and
merges. For the backward pass nothing is kept but q, k, v, their ranges, out and lse: the keys
rotate again, and their gradients follow them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_cp_dispatch._varying import vary_like
from jax_cp_dispatch.attention.chunks import Chunking, Holding
from jax_cp_dispatch.attention.layout import Placement
from jax_cp_dispatch.attention.local import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local_options import blocks_of_ranks
from jax_cp_dispatch.attention.merge import merge_partials
from jax_cp_dispatch.attention.schedules import Transport


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The static part of a call."""

    schedule: Any  # a hashable Schedule
    placement: Placement
    transport: Transport
    scale: float | None
    logit_soft_cap: float | None

    @property
    def last_step(self) -> int:
        return self.schedule.num_ranks - 1

    @property
    def chunking(self) -> Chunking:
        return Chunking(self.placement, self.schedule.num_chunks)

    def _options(self, q, k) -> dict[str, Any]:
        soft_cap = {"logit_soft_cap": self.logit_soft_cap}
        return {"scale": self.scale, **soft_cap, **blocks_of_ranks(q, k, rows=256)}

    def cut(self, k, v):
        """A rank's own chunks."""
        return self.chunking.cut(k), self.chunking.cut(v)

    def bring(self, own, held, step):
        """The chunks of the next step."""
        return self.schedule.bring(self.transport, own, held, step)

    def settle(self, travelling, home, step):
        return self.schedule.settle(self.transport, travelling, home, step)

    def attend(self, q, start, end, held, out, lse, step):
        """Adds the keys held at a step to output and lse."""
        holding = self._holding(step)
        k, v = map(holding.in_order, held)
        kv_start, kv_end = holding.ranges(start, end)
        partial = local_attention(q, k, v, kv_start, kv_end, **self._options(q, k))
        return merge_partials(out, lse, *partial)

    def gradients(self, q, start, end, held, out, lse, dout, step):
        """The part of dq, and what is added to the gradients of the chunks held at a step."""
        holding = self._holding(step)
        k, v = map(holding.in_order, held)
        kv_start, kv_end = holding.ranges(start, end)
        dq, *dkv = local_attention_backward(
            q, k, v, kv_start, kv_end, out, lse, dout, **self._options(q, k)
        )
        return dq, tuple(map(holding.in_slots, dkv))

    def _holding(self, step) -> Holding:
        rank = lax.axis_index(self.transport.axis_name)
        return self.chunking.holding(*self.schedule.held(rank, step))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rotating_attention(rotation: Rotation, q, k, v, start, end):
    """Attends query rows to the tokens [start, end) of the sequence; `[B, rows, N, Hv]`.

    All operands vary over the axis; `start` and `end` are `[B, rows]`, empty for rows that only
    fill up a block.
    """
    return _forward(rotation, q, k, v, start, end)[0]


def _forward(rotation, q, k, v, start, end):
    own, last = rotation.cut(k, v), rotation.last_step

    def one_step(carry, step):
        held, out, lse = carry
        following = rotation.bring(own, held, step)
        out, lse = rotation.attend(q, start, end, held, out, lse, step)
        return (following, out, lse), None

    carry = own, *nothing_attended(q, v)
    if last:
        carry, _ = lax.scan(one_step, carry, jnp.arange(last))
    out, lse = rotation.attend(q, start, end, *carry, last)
    out = out.astype(q.dtype)
    return out, (q, k, v, start, end, out, lse)


def nothing_attended(q, v):
    """Output and lse before the first step."""
    B, T, N = q.shape[:3]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    empty = jnp.zeros((B, T, N, v.shape[3]), dtype), jnp.full((B, N, T), -jnp.inf, dtype)
    return tuple(vary_like(empty, q))


def _backward(rotation, residuals, dout):
    q, k, v, start, end, out, lse = residuals
    own, last = rotation.cut(k, v), rotation.last_step

    def gradients(held, step):
        return rotation.gradients(q, start, end, held, out, lse, dout, step)

    def add_step(held, dq, travelling, home, step):
        arrived, home = rotation.settle(travelling, home, step)
        more_dq, dkv = gradients(held, step)
        if arrived is not None:
            dkv = jax.tree.map(jnp.add, arrived, dkv)
        return dq + more_dq, dkv, home

    def one_step(carry, step):
        held, dq, travelling, home = carry
        following = rotation.bring(own, held, step)
        return (following, *add_step(held, dq, travelling, home, step)), None

    held = rotation.bring(own, own, 0) if last else own
    dq, dkv = gradients(own, 0)
    if last:
        travelling, home = rotation.schedule.begin(dkv)
        carry = held, dq, travelling, home
        (held, dq, travelling, home), _ = lax.scan(one_step, carry, jnp.arange(1, last))
        dq, travelling, home = add_step(held, dq, travelling, home, last)
        arrived, home = rotation.settle(travelling, home, last + 1)
        dkv = home if arrived is None else arrived
    dk, dv = map(rotation.chunking.uncut, dkv)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


rotating_attention.defvjp(_forward, _backward)
