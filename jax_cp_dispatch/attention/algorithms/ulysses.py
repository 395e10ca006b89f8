"""`Ulysses`: each rank computes a share of the heads, over whole documents."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_cp_dispatch._ranks.varying import vary_alike, vary_like
from jax_cp_dispatch._residuals import named_context, named_context_received
from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, Call
from jax_cp_dispatch.attention.algorithms.exchange_once import Movement, exchange_once
from jax_cp_dispatch.attention.algorithms.head_exchange import (
    HeadExchange,
    repeat_heads,
    sum_copies,
)
from jax_cp_dispatch.attention.algorithms.parts_of_heads import Exchange
from jax_cp_dispatch.attention.algorithms.two_levels import (
    TwoLevels,
    attend_two_levels,
    outer_workload,
)
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.cost import Hardware, Moves, StepCost, Workload
from jax_cp_dispatch.cost.pairs import equal_pairs
from jax_cp_dispatch.cost.steps import attention_seconds, step_cost
from jax_cp_dispatch.cost.traffic import all_others, spread
from jax_cp_dispatch.documents.fingerprint import order_fingerprint
from jax_cp_dispatch.documents.ranges import PackedMask, gathered_ranges
from jax_cp_dispatch.global_call.kv_heads import kv_copies
from jax_cp_dispatch.masks import MaskRanges


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
