"""`Ulysses`: each rank computes a share of the heads, over whole documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._dispatch.arguments import outgoing, returning
from jax_cp_dispatch._dispatch.movement import move
from jax_cp_dispatch._dispatch.xla import AllGather, AllToAll
from jax_cp_dispatch._ranks.options import CollectiveOptions, vary_alike
from jax_cp_dispatch._residuals import checkpoint_name_kv, named_context
from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm
from jax_cp_dispatch.attention.algorithms.exchange_once import (
    Gathered,
    Movement,
    PendingExchange,
    gather_attend,
)
from jax_cp_dispatch.attention.operands import Call, Operands, Outputs
from jax_cp_dispatch.cost import Hardware, StepCost, Workload
from jax_cp_dispatch.cost.attention import Pass, all_others, attention_seconds, spread, step_cost
from jax_cp_dispatch.cost.pairs import equal_pairs
from jax_cp_dispatch.documents.documents import Documents, gathered_ranges
from jax_cp_dispatch.documents.fingerprint import order_fingerprint
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.segment_ids import gather_sequence, plan_to_all
from jax_cp_dispatch.global_call import kv_copies
from jax_cp_dispatch.masks.mask import zigzag_order
from jax_cp_dispatch.metadata.fields import single_rows

# ---- Tokens of all heads for all tokens of a share of the heads, and back: an all-to-all.
#
# Rows without heads, which all ranks need, are gathered instead.


class HeadExchange(NamedTuple):
    """The two exchanges of one call; static. Each is the transpose of the other."""

    exchange: CollectiveOptions  # options of the exchanges
    num_ranks: int  # W
    layout: str  # of the tokens on the ranks

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
        heads = (x.reshape(*x.shape[:2], self.num_ranks, -1, x.shape[3]) for x in arrays)
        parts = self._move([jnp.moveaxis(x, 2, 0) for x in heads], fingerprint)
        return [self._in_sequence_order(x) for x in parts]

    def to_tokens(
        self, arrays: Sequence[Float[Array, "B WT _ _"]]
    ) -> list[Float[Array, "B T _ _"]]:
        """Returns this rank's tokens of all heads."""
        if self.num_ranks == 1:
            return list(arrays)
        parts = self._move([self._by_ranks(x) for x in arrays])
        return [jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[4]) for x in parts]

    def to_all(self, rows: Sequence[Shaped[Array, "B T _ _"]]) -> list[Shaped[Array, "B WT _ _"]]:
        """Returns the rows of all ranks, in the order of the sequence."""
        if self.num_ranks == 1:
            return list(rows)
        sent = [x[None] for x in rows]
        sent = outgoing(sent, plan_to_all(self.num_ranks), capacity=self.num_ranks)
        parts = move(self.exchange, [sent], AllGather(self.exchange.axis_name))[0]
        return [self._in_sequence_order(x) for x in parts]

    def sums_of_all(
        self, rows: Sequence[Float[Array, "B WT _ _"]]
    ) -> list[Float[Array, "B T _ _"]]:
        """The transpose of `to_all`; sums are float32, unrounded."""
        if self.num_ranks == 1:
            return list(rows)
        parts = [self._by_ranks(x) for x in rows]
        plan, sums = plan_to_all(self.num_ranks), AllGather(self.exchange.axis_name, sums=True)
        returned = returning(parts, plan, num_tokens=1)
        moved = move(self.exchange, [returned], sums)[0]
        return [x[0] for x in moved]

    # Arrays of one number for each head: this rank's share of them, and back.

    def own(self, x: Float[Array, " N"]) -> Float[Array, " share"]:
        size = x.shape[0] // self.num_ranks
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.exchange.axis_name) * size, size)

    def largest(self, share: Float[Array, " share"]) -> Float[Array, " N"]:
        """Returns the numbers of all heads, the largest ones of all ranks."""
        size, axis_name = share.shape[0], self.exchange.axis_name
        none = vary_alike(jnp.full(self.num_ranks * size, -jnp.inf, share.dtype), like=share)
        first = lax.axis_index(axis_name) * size
        return lax.pmax(lax.dynamic_update_slice_in_dim(none, share, first, 0), axis_name)

    def _in_sequence_order(self, x: Float[Array, "W B T _ _"]) -> Float[Array, "B WT _ _"]:
        """Returns the rows of all ranks as one sequence."""
        x = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        if self.layout == "contiguous":
            return x
        return x[:, zigzag_permutation(x.shape[1], self.num_ranks, inverse=True)]

    def _by_ranks(self, x: Float[Array, "B WT _ _"]) -> Float[Array, "W B T _ _"]:
        """Returns the rows of a sequence by the ranks that hold them."""
        if self.layout == "zigzag":
            x = x[:, zigzag_permutation(x.shape[1], self.num_ranks)]
        return jnp.moveaxis(x.reshape(x.shape[0], self.num_ranks, -1, *x.shape[2:]), 1, 0)

    def _move(self, parts: list[Array], fingerprint: Array | None = None) -> list[Array]:
        """Sends part c of rank r to rank c, as its part r."""
        rank = np.arange(self.num_ranks)
        plan = single_rows(np.tile(rank, (self.num_ranks, 1)), rank[:, None])
        sent = outgoing(parts, plan, capacity=self.num_ranks, fingerprint=fingerprint)
        return move(self.exchange, [sent], AllToAll(self.exchange.axis_name))[0]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeat_heads(x: Float[Array, "B T K H"], copies: int) -> Float[Array, "B T copied H"]:
    """Returns each KV head `copies` times; their gradients are summed in float32."""
    return x if copies == 1 else jnp.repeat(x, copies, axis=2)


def sum_copies(x: Float[Array, "B T copied H"], copies: int) -> Float[Array, "B T K H"]:
    """The transpose of `repeat_heads`, unrounded."""
    x = x.reshape(*x.shape[:2], -1, copies, x.shape[3])
    return jnp.sum(x, axis=3, dtype=sum_dtype(x.dtype))


def _repeat_backward(copies: int, _: None, dx: Array) -> tuple[Array]:
    return (dx if copies == 1 else sum_copies(dx, copies).astype(dx.dtype),)


repeat_heads.defvjp(lambda x, copies: (repeat_heads(x, copies), None), _repeat_backward)


# ---- Heads shared over the last mesh axis, and another algorithm over the axes before it (USP).
#
# The ranks of the last axis hold consecutive parts of the sequence, in zigzag order consecutive
# blocks from both ends. So together they are one rank of the axes before it, with all their tokens,
# in the same layout.


def outer_call(call: Call) -> Call:
    *outer, inner = call.axis_sizes
    exchange = dataclasses.replace(call.exchange, axis_names=call.exchange.axis_names[:-1])
    sizes: Any = {"axis_sizes": tuple(outer), "num_heads": call.num_heads // inner}
    return dataclasses.replace(call, exchange=exchange, **sizes)


@partial(jax.jit, static_argnums=(0, 1))  # equal calls of a program are traced and lowered once
def attend_two_levels(
    outer: Algorithm, call: Call, operands: Operands, packed: Documents
) -> Outputs:
    part, layout, of_outer = operands.varying(call.exchange), call.order.layout, outer_call(call)
    num_outer, num_inner = of_outer.num_ranks, call.axis_sizes[-1]
    if layout == "zigzag":
        of_outer = dataclasses.replace(of_outer, order=zigzag_order(num_outer))
        if operands.q.shape[1] % 2 and num_outer > 1 and num_inner > 1:
            raise ValueError(
                f"{call.op}: a rank holds {operands.q.shape[1]} tokens in {call.order}, but two "
                "levels need an even number. Pad the tokens (segment 0 is padding) to a multiple "
                "of two per rank."
            )
    inner = dataclasses.replace(call.exchange, axis_names=call.exchange.axis_names[-1:])
    heads = HeadExchange(inner, num_inner, layout)
    if call.expansion is None:
        copies = kv_copies(part.q.shape[2], part.k.shape[2], num_inner)
        kv: Any = [repeat_heads(x, copies) for x in part.moved]
        q, k, v = checkpoint_name_kv(heads.to_heads([part.q, *kv]))
    else:
        (q,), k, v = heads.to_heads([part.q]), tuple(heads.to_all(part.k)), None
        q, k = checkpoint_name_kv((q, k))
    sink = None if part.sink is None else heads.own(part.sink)
    part = part._replace(q=q, k=k, v=v, sink=sink)
    if num_inner > 1:  # the columns of all ranks that share the heads
        packed = vary_alike(jax.tree.map(jnp.asarray, packed), also=call.exchange.axis_names)
        packed = gather_sequence(inner, packed, num_inner, layout == "zigzag")
    outputs = outer.run(of_outer, part, packed)
    lses = [] if outputs.lse is None else [outputs.lse[..., None]]
    out, *lses = heads.to_tokens([outputs.out, *lses])
    largest = outputs.max_logits
    if largest is not None:
        largest = heads.largest(lax.stop_gradient(largest))
    return Outputs(out, lses[0][..., 0] if lses else None, largest)


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

    With `outer`, pass several axes as `axis_name`. The heads are shared over the last axis alone,
    for example inside a node. The ranks that share them are together one rank of the outer
    algorithm, which runs over the other axes, for each share of the heads. Steps and residuals are
    then those of the outer algorithm. Gradients of KV heads return in the dtype of k.

    Attributes:
      outer: the algorithm over all axes but the last, for example `Zigzag()`. If it follows a plan,
        it makes the plan in the call. None: the heads are shared over all axes.
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

    def why_not(self, call: Call, mask: Any) -> str | None:
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
        reason = super().why_not(call, mask)
        if reason is None and self.outer is not None:
            reason = self.outer.why_not(outer_call(call), mask)
            reason = reason and f"{reason} Or pass Ulysses(outer=Zigzag())."
        return reason

    def head_axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names if self.outer is None else names[-1:]

    def run(self, call: Call, operands: Operands, documents: Documents) -> Outputs:
        names, num_heads, copies = self.head_axes(call.exchange.axis_names), call.num_heads, 1
        if call.expansion is not None:
            expansion = call.expansion.sharing(names, num_heads, operands)
            call = dataclasses.replace(call, expansion=expansion)
        if self.outer is not None:
            return attend_two_levels(self.outer, call, operands, documents)
        if call.expansion is None:
            copies = kv_copies(num_heads, operands.k.shape[2], call.num_ranks)
        return _attend_share_of_heads(call, copies, operands, documents)

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        """Those whose ranks divide the query heads; with latents only if weights may be whole."""
        divide = workload.num_heads % workload.num_ranks == 0
        return (cls(),) if divide and workload.latent_size is None else ()

    def _steps(self, of: Pass) -> list[StepCost]:
        """The all-to-all before attention, a share of the heads, and the all-to-all after.

        Forward, q, k and v, then the output. Backward, dout, then dq, dk and dv: in float32 if KV
        heads are repeated, whose gradients are then summed. Latent rows go to every rank, and each
        expands its heads of all of them, as with weights that are sharded. With an outer algorithm,
        the ranks of a node share the heads, and its steps between nodes take the place of the
        computation.
        """
        workload, hardware, backward, _ = of
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
        if self.outer is not None:
            part, links, _ = outer_workload(workload, hardware)
            compute = self.outer.step_costs(part, hardware=links, backward=backward)
        else:
            # Repeated KV heads share no products: on 8 virtual devices, with four copies it took
            # 1.2 of the time of "placed", and without copies 0.9.
            sizes: Any = {"q_rows": rows, "kv_rows": copies * rows, "is_planned": copies > 1}
            seconds = attention_seconds(of, equal_pairs(workload, hardware), **sizes)
            compute = [StepCost(seconds, 0.0, 0.0)]

        def exchange(num_bytes: float) -> StepCost:
            sent = spread(num_bytes * (n - 1) / n, n, hardware)
            return step_cost(of, 0.0, sent, all_others(n, hardware), num_bytes / n)

        q, are_sums = float(workload.q_bytes(rows)), copies > 1 and self.outer is None
        if workload.latent_size is not None:  # go whole to every rank
            copies, are_sums = n, True
        kv = copies * workload.kv_bytes(rows, itemsize=4 if backward and are_sums else None)
        before, after = (q, q + kv) if backward else (q + kv, q)
        return [exchange(before), *compute, exchange(after)]

    def _pairs(self, of: Pass) -> Any:
        if self.outer is None:
            return super()._pairs(of)
        workload, hardware, size = outer_workload(of.workload, of.hardware)
        return self.outer._pairs(Pass(workload, hardware)) / size  # of all heads

    def rearrangement_seconds(
        self, workload: Workload, hardware: Hardware, *, layout: str, with_backward: bool
    ) -> float:
        if self.outer is None:
            return 0.0
        part, links, _ = outer_workload(workload, hardware)
        options: Any = {"layout": layout, "with_backward": with_backward}
        return self.outer.rearrangement_seconds(part, links, **options)


@partial(jax.jit, static_argnums=(0, 1))  # equal calls of a program are traced and lowered once
def _attend_share_of_heads(
    call: Call, copies: int, operands: Operands, packed: Documents
) -> Outputs:
    shape, operands = operands.q.shape[:2], operands.varying(call.exchange)
    order = {"layout": call.order.layout, "checks_order": call.checks_order}
    found = gathered_ranges(call.exchange, packed, shape, **order)
    ranges, fault = named_context(vary_alike(found, also=call.exchange.axis_names))
    fingerprint = None
    if fault is not None:
        fingerprint = order_fingerprint(fault, lax.axis_index(call.exchange.axis_name))
    heads = HeadExchange(call.exchange, call.num_ranks, call.order.layout)
    if operands.sink is not None:
        operands = operands._replace(sink=heads.own(operands.sink))
    given = vary_alike((operands, Gathered(ranges, fault, fingerprint)))
    outputs: Any = gather_attend(ShareOfHeads(call, heads, copies, copies > 1), *given)
    if outputs.max_logits is None:
        return outputs
    return outputs._replace(max_logits=heads.largest(lax.stop_gradient(outputs.max_logits)))


@dataclasses.dataclass(frozen=True)
class ShareOfHeads(Movement):
    """All tokens of a share of the heads come, at once."""

    call: Call
    heads: HeadExchange  # the exchanges
    copies: int  # of each KV head
    sums_dkv: bool
    block_rows = 256
    in_parts = False

    def send(self, gathered: Gathered, part: Operands) -> PendingExchange:
        fingerprint = gathered.fingerprint
        if self.call.expansion is not None:
            came = [*self.heads.to_heads([part.q], fingerprint), *self.heads.to_all(part.k)]
        else:
            kv: Any = [repeat_heads(x, self.copies) for x in part.moved]
            came = self.heads.to_heads([part.q, *kv], fingerprint)
        q, *kv = checkpoint_name_kv(came)
        return PendingExchange(None, lambda _: (q, tuple(kv)))

    def give_back(self, gathered: Gathered, out: Array, lse: Array) -> PendingExchange:
        lses = [jnp.swapaxes(lse, 1, 2)[..., None]] if self.call.return_lse else []
        home, *lses = named_context(self.heads.to_tokens([out, *lses]))
        return PendingExchange(None, lambda _: (home, lses[0][..., 0] if lses else None))

    def send_cotangents(self, gathered: Gathered, cotangents: Outputs) -> PendingExchange:
        dout, dlse, _ = cotangents
        lses = [] if dlse is None else [dlse[..., None]]
        dout, *lses = self.heads.to_heads([dout, *lses])
        return PendingExchange(None, lambda _: Outputs(dout, lses[0][..., 0] if lses else None))

    def give_back_gradients(self, gathered: Gathered, dq: Array, dkv: Any) -> PendingExchange:
        if self.call.expansion is not None:  # None of integers
            (dq,) = self.heads.to_tokens([dq])
            sums = iter(self.heads.sums_of_all([x for x in dkv if x is not None]))
            dkv = [None if x is None else next(sums) for x in dkv]
        else:
            dq, *dkv = self.heads.to_tokens([dq, *dkv])
            if self.copies > 1:
                dkv = [sum_copies(x, self.copies).astype(dq.dtype) for x in dkv]
        return PendingExchange(None, lambda _: (dq, tuple(dkv)))
