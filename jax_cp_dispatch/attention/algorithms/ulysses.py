"""`Ulysses`: each rank computes a share of the heads, over whole documents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32, Shaped

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._dispatch import move, outgoing, returning
from jax_cp_dispatch._dispatch.xla import dispatch_or_collectives
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import CollectiveOptions, vary_alike, vary_like
from jax_cp_dispatch._residuals import named_context, named_context_received
from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, Call
from jax_cp_dispatch.attention.algorithms.exchange_once import Exchange, Movement, exchange_once
from jax_cp_dispatch.attention.operands import AttentionOptions, Operands, Outputs
from jax_cp_dispatch.cost import Hardware, Moves, StepCost, Workload
from jax_cp_dispatch.cost.attention import all_others, attention_seconds, spread, step_cost
from jax_cp_dispatch.cost.pairs import equal_pairs
from jax_cp_dispatch.documents.fingerprint import order_fingerprint
from jax_cp_dispatch.documents.layouts import PackedMask, gathered_ranges, zigzag_permutation
from jax_cp_dispatch.documents.segment_ids import gather_sequence, plan_to_all
from jax_cp_dispatch.global_call import kv_copies
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.masks.mask import zigzag_order
from jax_cp_dispatch.metadata import Metadata

# ---- Exchanges tokens of all heads for all tokens of a share of the heads, and back: an all-to-
# all.
#
# Rows without heads, which all ranks need, are gathered instead.


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
        collectives = _AllGather(self.exchange.axis_name)

        def by_dispatch(rows: list[Array]) -> list[Array]:
            plan = plan_to_all(self.num_ranks)
            sent = outgoing(rows, plan, capacity=self.num_ranks)
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
        collectives = _AllGather(self.exchange.axis_name).transposed()

        def by_dispatch(parts: list[Array]) -> list[Array]:
            plan = plan_to_all(self.num_ranks)
            returned = returning(parts, plan, num_tokens=1)
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
    argument = outgoing(parts, plan, capacity=num_ranks, fingerprint=fingerprint)
    return move(exchange, [argument], by_collectives)[0]


# ---- Heads shared over the last mesh axis, and another algorithm over the axes before it (USP).


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


@dataclasses.dataclass(frozen=True)
class Ulysses(Algorithm):
    """Each rank computes a share of the heads, over whole documents.

    An all-to-all gives each rank all tokens of its N / W query heads and of the KV heads that these
    read. The rank computes attention over whole documents, and a second all-to-all returns the
    output. All ranks have equal work, whatever the mask and the documents. A rank sends (W - 1) / W
    of its rows of q, k, v and the output, once. Tokens and documents stay as they are. Use it if
    the ranks divide the query heads.

    If W does not divide K, KV heads are repeated before they move, lcm(K, W) / K times. The
    derivative uses the same exchanges in reverse; gradients of repeated KV heads are summed in
    float32. Latent rows (`expand`) are gathered instead, once, and each rank expands those of all
    tokens to its KV heads: shard the weights over the ranks, else it expands all heads and keeps
    its own. Residuals per rank: its heads of q, k, v and the output, of all tokens, its lse, and
    the ranges of all tokens.

    With `outer`, the heads are shared over the last axis of `axis_name` alone, for example inside
    a node. The ranks that share them are one rank of the outer algorithm over the axes before it,
    which moves their heads of keys, and whose steps and residuals these are. The KV heads that a
    rank holds are those of its query heads; their gradients return in the dtype of k.

    Attributes:
      outer: the algorithm over the axes before the last, for example `Zigzag()`; None: the heads
        are shared over all ranks. It plans in the call, if it plans.
    References:
      Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509); Fang and Zhao, USP (arXiv:2405.07719).
    """

    name: ClassVar[str] = "ulysses"
    outer: Algorithm | None = None

    @property
    def label(self) -> str:
        return self.name if self.outer is None else f"{self.name}_{self.outer.label}"

    def check(self, op: str) -> None:
        if self.outer is None:
            return
        if not isinstance(self.outer, Algorithm):
            raise TypeError(
                f"{op}: outer is {self.outer!r}; it needs to be an algorithm, such as Zigzag(), or "
                "omitted."
            )
        self.outer.check(op)

    def why_not(self, call: Call) -> str | None:
        sharing = call.num_ranks
        if self.outer is not None:
            if len(call.axis_sizes) < 2:
                return (
                    f"got Ulysses(outer={self.outer!r}) over one mesh axis, but two levels need "
                    "two mesh axes. Pass axis_name=(outer axis, inner axis): heads are shared over "
                    "the last. Or omit outer."
                )
            sharing = call.axis_sizes[-1]
        if call.num_heads % sharing:
            return (
                f"q has {call.num_heads} heads but there are {sharing} ranks, which must "
                "divide them: each rank computes a share of the heads. Pass algorithm='zigzag' or "
                "'balanced', or use fewer ranks."
            )
        if self.outer is None:
            return super().why_not(call)
        return super().why_not(call) or TwoLevels(self.outer, call.options).why_not(call)

    def head_axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names if self.outer is None else names[-1:]

    def attend(
        self, options: AttentionOptions, operands: Operands, packed: PackedMask, plan: Any
    ) -> Outputs:
        names, num_heads = self.head_axes(options.exchange.axis_names), operands.q.shape[2]
        if options.expansion is not None:
            expansion = options.expansion.sharing(names, num_heads, operands)
            options = dataclasses.replace(options, expansion=expansion)
        if self.outer is not None:
            return attend_two_levels(TwoLevels(self.outer, options), operands, packed)
        num_ranks, copies = lax.axis_size(options.exchange.axis_name), 1
        if options.expansion is None:
            copies = kv_copies(num_heads, operands.k.shape[2], num_ranks)
        return _attend(ShareOfHeads(options, num_ranks, copies), operands, packed)

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        return (cls(),) if _can_share_heads(workload) else ()

    def _steps(
        self, workload: Workload, hardware: Hardware, moves: Moves | None, *, backward: bool
    ) -> list[StepCost]:
        """The all-to-all before attention, a share of the heads, and the all-to-all after.

        Forward, q, k and v, then the output. Backward, dout, then dq, dk and dv: in float32 if KV
        heads are repeated, whose gradients are then summed. Latent rows go to every rank, and each
        expands its heads of all of them, as with weights that are sharded. With an outer algorithm,
        the ranks of a node share the heads, and its steps between nodes take the place of the
        computation.
        """
        rows, n = workload.rows_per_rank, workload.num_ranks
        if self.outer is not None:
            n = hardware.node_size(n)
        if workload.num_heads % n:
            raise ValueError(
                f"step_costs: {self.label!r} shares {workload.num_heads} heads over {n} ranks, "
                "which must divide them. Use another algorithm, or fewer ranks."
            )
        copies = 1
        if workload.latent_size is None:
            copies = kv_copies(workload.num_heads, workload.num_kv_heads, n)
        compute = [StepCost(self._compute(workload, hardware, copies, backward=backward), 0.0, 0.0)]
        if self.outer is not None:
            part, links, _ = outer_workload(workload, hardware)
            compute = self.outer.step_costs(part, hardware=links, backward=backward)

        def exchange(num_bytes: float) -> StepCost:
            sent = spread(num_bytes * (n - 1) / n, n, hardware)
            options = all_others(n, hardware), workload, hardware
            return step_cost(0.0, sent, *options, own_bytes=num_bytes / n)

        q, are_sums = float(workload.q_bytes(rows)), copies > 1 and self.outer is None
        if workload.latent_size is not None:  # go whole to every rank
            copies, are_sums = n, True
        kv = copies * workload.kv_bytes(rows, itemsize=4 if backward and are_sums else None)
        before, after = (q, q + kv) if backward else (q + kv, q)
        return [exchange(before), *compute, exchange(after)]

    def _compute(
        self, workload: Workload, hardware: Hardware, copies: int, *, backward: bool
    ) -> float:
        rows = workload.rows_per_rank
        return attention_seconds(
            equal_pairs(workload, hardware),
            *(workload, hardware),
            q_rows=rows,
            kv_rows=copies * rows,
            backward=backward,
            # Repeated KV heads share no products: on 8 virtual devices, with four copies it took
            # 1.2 of the time of "placed", and without copies 0.9.
            is_planned=copies > 1,
        )

    def _pairs(self, workload: Workload, hardware: Hardware) -> Any:
        if self.outer is None:
            return super()._pairs(workload, hardware)
        part, links, size = outer_workload(workload, hardware)
        return self.outer._pairs(part, links) / size  # of all heads

    def rearrangement_seconds(
        self, workload: Workload, hardware: Hardware, *, layout: str, with_backward: bool
    ) -> float:
        if self.outer is None:
            return 0.0
        part, links, _ = outer_workload(workload, hardware)
        options: Any = {"layout": layout, "with_backward": with_backward}
        return self.outer.rearrangement_seconds(part, links, **options)


def _can_share_heads(workload: Workload) -> bool:
    """Whether the ranks divide the query heads, and keys move: weights may be whole."""
    return workload.num_heads % workload.num_ranks == 0 and workload.latent_size is None


@partial(jax.jit, static_argnums=0)  # equal calls of a program are traced and lowered once
def _attend(movement: ShareOfHeads, operands: Operands, packed: PackedMask) -> Outputs:
    """Computes attention of this rank's rows; the arguments are checked."""
    options, shape = movement.options, operands.q.shape[:2]
    operands = operands.varying(options.exchange)
    order = {"layout": options.order.layout, "checks_order": options.checks_order}
    leaves, tree = jax.tree.flatten(gathered_ranges(options.exchange, packed, shape, **order))
    leaves = named_context(vary_alike(leaves, also=options.exchange.axis_names))
    leaves, tree = jax.tree.flatten((operands, tree.unflatten(leaves)))
    return exchange_once(movement, *tree.unflatten(vary_alike(leaves)))


@dataclasses.dataclass(frozen=True)
class ShareOfHeads(Movement):
    """All tokens of a share of the heads come; `arrays` are what tokens see, and `order_fault`.

    Attributes:
      options: of the call.
      num_ranks: W.
      copies: of each KV head.
    """

    options: AttentionOptions
    num_ranks: int
    copies: int
    block_rows = 256

    @property
    def _heads(self) -> HeadExchange:
        return HeadExchange(self.options.exchange, self.num_ranks, self.options.order.layout)

    def ranges(self, arrays: Any) -> MaskRanges:
        return arrays[0]

    def move(self, moved: Any) -> list[Any]:
        return moved()

    def send(self, arrays: Any, part: Operands) -> Exchange:
        q, (_, fault) = part.q, arrays
        fingerprint = None
        if fault is not None:
            here = lax.axis_index(self.options.exchange.axis_name)
            fingerprint = order_fingerprint(fault, here)

        def moved():
            if self.options.expansion is not None:
                return [*self._heads.to_heads([q], fingerprint), *self._heads.to_all(part.k)]
            kv: Any = [repeat_heads(x, self.copies) for x in part.moved]
            return self._heads.to_heads([q, *kv], fingerprint)

        def read(came):
            q, *kv = named_context_received(came)
            return q, tuple(kv)

        return Exchange(moved, read)

    def give_back(self, arrays: Any, out: Array, lse: Array) -> Exchange:
        lses = [jnp.swapaxes(lse, 1, 2)[..., None]] if self.options.return_lse else []

        def read(came):
            home, *lses = named_context(came)
            return home, lses[0][..., 0] if lses else None

        return Exchange(lambda: self._heads.to_tokens([out, *lses]), read)

    def send_cotangents(self, arrays: Any, cotangents: Outputs) -> Exchange:
        dout, dlse, _ = cotangents
        lses = [] if dlse is None else [dlse[..., None]]
        read = lambda came: Outputs(came[0], came[1][..., 0] if lses else None)
        return Exchange(lambda: self._heads.to_heads([dout, *lses]), read)

    def give_back_gradients(self, arrays: Any, dq: Array, dkv: Any) -> Exchange:
        if self.options.expansion is not None:  # None of integers
            moving = [x for x in dkv if x is not None]

            def moved():
                return [*self._heads.to_tokens([dq]), *self._heads.sums_of_all(moving)]

            def of_rows(came):
                dq, *sums = came
                sums = iter(sums)
                return dq, tuple(None if x is None else next(sums) for x in dkv)

            return Exchange(moved, of_rows)

        def read(came):
            dq, *dkv = came
            if self.copies > 1:
                dkv = [sum_copies(x, self.copies).astype(dq.dtype) for x in dkv]
            return dq, tuple(dkv)

        return Exchange(lambda: self._heads.to_tokens([dq, *dkv]), read)

    def dkv_dtype(self, dtype: Any) -> Any:
        """Each gradient is final; those of copies are summed first."""
        return dtype if self.copies == 1 else None

    def checked(self, arrays: Any, out: Float[Array, "..."]) -> Float[Array, "..."]:
        _, fault = arrays
        if fault is None:  # else one rank, and XLA's collectives, raise no error
            return out
        return jnp.where(fault == 0, out, jnp.nan)

    def own_sink(self, sink: Float[Array, " N"]) -> Float[Array, " share"]:
        size = sink.shape[0] // self.num_ranks
        return lax.dynamic_slice_in_dim(sink, self._first(size), size)

    def whole_sink(self, dsink: Float[Array, " share"], sink: Float[Array, " N"]) -> Array:
        return self._among_all(dsink, jnp.zeros_like(sink))

    def largest(self, max_logits: Float[Array, " share"], num_heads: int) -> Float[Array, " N"]:
        (none,) = vary_like([jnp.full(num_heads, -jnp.inf, max_logits.dtype)], max_logits)
        return super().largest(self._among_all(max_logits, none), num_heads)

    def _among_all(self, share: Float[Array, " share"], others: Float[Array, " N"]) -> Array:
        """Returns the numbers of all heads: those of this rank's, and of the others."""
        first = self._first(share.shape[0])
        return lax.dynamic_update_slice_in_dim(others, share.astype(others.dtype), first, 0)

    def _first(self, size: int) -> Int[Array, ""]:
        return lax.axis_index(self.options.exchange.axis_name) * size
