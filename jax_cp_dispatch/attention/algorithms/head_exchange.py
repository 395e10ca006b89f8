"""Exchanges tokens of all heads for all tokens of a share of the heads, and back: an all-to-all.

Rows without heads, which all ranks need, are gathered instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._dispatch import move, outgoing, returning
from jax_cp_dispatch._dispatch.by_xla import dispatch_or_collectives
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.order import plan_to_all
from jax_cp_dispatch.metadata import Metadata


class HeadExchange(NamedTuple):
    """The two exchanges of one call; static. Each is the transpose of the other.

    Attributes:
      exchange: options of the exchanges.
      num_ranks: W.
      layout: of the tokens on the ranks.
    """

    exchange: CollectiveOptions
    num_ranks: int
    layout: str

    def to_heads(
        self,
        arrays: Sequence[Float[Array, "B T _ _"]],
        fingerprint: Int32[Array, " 9"] | None = None,
    ) -> list[Float[Array, "B WT _ _"]]:
        """Returns all tokens of this rank's share of the heads, in the order of the sequence.

        Ranks compare a fingerprint first; XLA's collectives do not.
        """
        if self.num_ranks == 1:
            return list(arrays)
        parts = self._move([self._by_heads(x) for x in arrays], fingerprint)
        return [self._in_sequence_order(_one_after_the_other(x)) for x in parts]

    def to_tokens(
        self, arrays: Sequence[Float[Array, "B WT _ _"]]
    ) -> list[Float[Array, "B T _ _"]]:
        """Returns this rank's tokens of all heads."""
        if self.num_ranks == 1:
            return list(arrays)
        parts = self._move([self._by_ranks(self._in_stored_order(x)) for x in arrays])
        return [jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[4]) for x in parts]

    def to_all(self, rows: Sequence[Shaped[Array, "B T _ _"]]) -> list[Shaped[Array, "B WT _ _"]]:
        """Returns the rows of all ranks, in the order of the sequence."""
        if self.num_ranks == 1:
            return list(rows)
        collectives, op = _AllGather(self.exchange.axis_name), self.exchange.op

        def by_dispatch(rows: list[Array]) -> list[Array]:
            plan = plan_to_all(self.num_ranks)
            sent = outgoing(op, "latents", rows, plan, capacity=self.num_ranks)
            return move(self.exchange, [sent], collectives)[0]

        by_xla = lambda rows: collectives(rows)
        parts = [x[None] for x in rows]
        parts = dispatch_or_collectives(self.exchange, parts, by_dispatch, by_xla)
        return [self._in_sequence_order(_one_after_the_other(x)) for x in parts]

    def sums_of_all(
        self, rows: Sequence[Float[Array, "B WT _ _"]]
    ) -> list[Float[Array, "B T _ _"]]:
        """The transpose of `to_all`; sums are float32, unrounded."""
        if self.num_ranks == 1:
            return list(rows)
        parts = [self._by_ranks(self._in_stored_order(x)) for x in rows]
        collectives, op = _AllGather(self.exchange.axis_name).transposed(), self.exchange.op

        def by_dispatch(parts: list[Array]) -> list[Array]:
            plan = plan_to_all(self.num_ranks)
            returned = returning(op, "latents", parts, plan, num_tokens=1)
            return move(self.exchange, [returned], collectives)[0]

        by_xla = lambda parts: collectives(parts)
        moved = dispatch_or_collectives(self.exchange, parts, by_dispatch, by_xla)
        return [x[0] for x in moved]

    def _by_heads(self, x: Array) -> Float[Array, "W B T _ _"]:
        return jnp.moveaxis(x.reshape(*x.shape[:2], self.num_ranks, -1, x.shape[3]), 2, 0)

    def _by_ranks(self, x: Array) -> Float[Array, "W B T _ _"]:
        return jnp.moveaxis(x.reshape(x.shape[0], self.num_ranks, -1, *x.shape[2:]), 1, 0)

    def _in_sequence_order(self, x: Array) -> Array:
        if self.layout == "contiguous":
            return x
        return x[:, zigzag_permutation(x.shape[1], self.num_ranks, inverse=True)]

    def _in_stored_order(self, x: Array) -> Array:
        if self.layout == "contiguous":
            return x
        return x[:, zigzag_permutation(x.shape[1], self.num_ranks)]

    def _move(self, parts: list[Array], fingerprint: Array | None = None) -> list[Array]:
        """Sends part c of rank r to rank c, as its part r."""
        by_collectives = _AllToAll(self.exchange.axis_name)
        by_xla = lambda moved: by_collectives(moved[0])
        by_dispatch = lambda moved: _by_dispatch(self.exchange, moved[0], moved[1], by_collectives)
        return dispatch_or_collectives(self.exchange, (parts, fingerprint), by_dispatch, by_xla)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeat_heads(x: Float[Array, "B T K H"], copies: int) -> Float[Array, "B T copied H"]:
    """Returns each KV head `copies` times; their gradients are summed in float32."""
    return x if copies == 1 else jnp.repeat(x, copies, axis=2)


def sum_copies(x: Float[Array, "B T copied H"], copies: int) -> Float[Array, "B T K H"]:
    """The transpose of `repeat_heads`, unrounded."""
    x = x.reshape(*x.shape[:2], -1, copies, x.shape[3])
    return jnp.sum(x, axis=3, dtype=sum_dtype(x.dtype))


def _repeat_forward(x: Array, copies: int) -> tuple[Array, None]:
    return repeat_heads(x, copies), None


def _repeat_backward(copies: int, _: None, dx: Array) -> tuple[Array]:
    return (dx if copies == 1 else sum_copies(dx, copies).astype(dx.dtype),)


repeat_heads.defvjp(_repeat_forward, _repeat_backward)


def _one_after_the_other(x: Float[Array, "W B T _ _"]) -> Float[Array, "B WT _ _"]:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


class _AllToAll(NamedTuple):
    """XLA's all-to-all of each array; its transpose is itself."""

    axis_name: AxisName

    @jax.named_scope("cpd.exchange")
    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        return [lax.all_to_all(x, self.axis_name, 0, 0) for x in arrays]

    def transposed(self) -> _AllToAll:
        return self


class _AllGather(NamedTuple):
    """XLA's all-gather of arrays with one row; its transpose sums the rows of all ranks."""

    axis_name: AxisName

    @jax.named_scope("cpd.exchange")
    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        return [lax.all_gather(x, self.axis_name, tiled=True) for x in arrays]

    def transposed(self) -> _SumScatter:
        return _SumScatter(self.axis_name)


class _SumScatter(NamedTuple):
    """The transpose of `_AllGather`; integers, which have no derivative, do not come here."""

    axis_name: AxisName

    @jax.named_scope("cpd.exchange")
    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        wide = [x.astype(sum_dtype(x.dtype)) for x in arrays]
        return [lax.psum_scatter(x, self.axis_name, tiled=True) for x in wide]

    def transposed(self) -> _AllGather:
        return _AllGather(self.axis_name)


def _by_dispatch(
    exchange: CollectiveOptions,
    parts: list[Array],
    fingerprint: Array | None,
    by_collectives: _AllToAll,
):
    """Moves the parts by one `dispatch`: each part is one token, and each token one shard."""
    num_ranks = parts[0].shape[0]
    shape = (num_ranks, num_ranks)
    rank = np.arange(num_ranks)
    plan = Metadata(
        dst_rank=np.broadcast_to(rank.astype(np.int32), shape),
        dst_offset=np.broadcast_to(rank.astype(np.uint32)[:, None], shape),
        seq_len=np.ones(shape, np.uint32),
        num_recv_tokens=np.concatenate(
            [np.ones(shape, np.uint32), np.full((num_ranks, 1), num_ranks, np.uint32)], axis=1
        ),
        world_size=num_ranks,
    )
    argument: Any = outgoing(exchange.op, "heads", parts, plan, capacity=num_ranks)
    return move(exchange, [argument._replace(fingerprint=fingerprint)], by_collectives)[0]
