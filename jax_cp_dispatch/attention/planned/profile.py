"""Profiles balanced and placed attention: runs and times the exchanges and attention of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Float

from jax_cp_dispatch.attention.check_arguments import (
    HostOrDevice,
    check_plan,
    check_rows,
    is_stack,
    read_mask_of_plan,
)
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.packed_mask import PackedMask
from jax_cp_dispatch.attention.planned import balanced, placed
from jax_cp_dispatch.attention.planned.balanced import attend_balanced
from jax_cp_dispatch.attention.planned.call import attend_received, fingerprint_of_call
from jax_cp_dispatch.attention.planned.placed import attend_placed
from jax_cp_dispatch.attention.profile.keywords import read_keywords
from jax_cp_dispatch.attention.profile.record import AttentionProfile, StepRecord
from jax_cp_dispatch.attention.profile.stopwatch import Stopwatch, check_tokens, stopwatch_over
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan


def balanced_attention_profile(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T K Hv"],
    plan: AttentionPlan,
    *,
    mesh: Mesh,
    axis_name: str,
    repeats: int = 3,
    **options: Any,
) -> AttentionProfile:
    """Times `balanced_attention`, forward, as one program and step by step.

    The steps are "send" (queries, keys and values), "attend" and "return" (the output). Nothing
    overlaps. Call outside `jit` and `jax.shard_map`, in a process that owns all devices of the
    mesh. Each step runs separately, with synchronisation before and after it.

    Args:
      q, k, v: global arrays; `axis_name` has n devices, and n divides T.
      plan: of all ranks, for these arrays.
      mesh: the mesh with `axis_name`; the arrays are replicated over its other axes.
      axis_name: the mesh axis of the ranks.
      repeats: runs of every program; medians are returned.
      options: the other keywords of `balanced_attention`; segment_ids and positions are global.
    Returns:
      The times, and the output in the layout of q.
    Raises:
      TypeError, ValueError: as `balanced_attention`.
      jax.errors.JaxRuntimeError: the plan was made for another batch.
    """
    op = "balanced_attention_profile"
    stopwatch = stopwatch_over(op, mesh, axis_name, repeats)
    check_plan(op, plan, AttentionPlan)
    call = _call(op, stopwatch, (q, k, v), plan, options)
    return call.profile(attend_balanced, balanced.send, balanced.return_output)


def placed_attention_profile(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T K Hv"],
    plan: PlacedPlan,
    *,
    mesh: Mesh,
    axis_name: str,
    repeats: int = 3,
    **options: Any,
) -> AttentionProfile:
    """Times `placed_attention`, forward; otherwise as `balanced_attention_profile`.

    The steps are "send" (keys and values) and "attend". All arrays are in placed order.
    """
    op = "placed_attention_profile"
    stopwatch = stopwatch_over(op, mesh, axis_name, repeats)
    check_plan(op, plan, PlacedPlan)
    call = _call(op, stopwatch, (q, k, v), plan, options)
    return call.profile(attend_placed, placed.send)


# Axes that the ranks share: of columns, and of rows that a rank received. Those of a plan and of
# the documents from which it was made.
_ROWS, _BY_RANK = 1, 0
_PLAN = (_BY_RANK, _ROWS)


class _Call(NamedTuple):
    """One call: its operands on the mesh, and its options.

    Attributes:
      stopwatch: over the ranks.
      options: of attention.
      qkv: the arrays.
      plan: the plan, and what its tokens see.
    """

    stopwatch: Stopwatch
    options: AttentionOptions
    qkv: tuple[Any, ...]
    plan: tuple[Any, ...]

    def program(self, fn: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any) -> Any:
        return self.stopwatch.program(fn, in_axes, out_axes)

    def profile(
        self,
        attend: Callable[..., Any],
        send: Callable[..., Any],
        return_output: Callable[..., Any] | None = None,
    ) -> AttentionProfile:
        """Times `attend` as one program, then its steps."""
        options, of_call = self.options, [_ROWS, _ROWS, _ROWS, *_PLAN]

        def sent(q, k, v, plan, packed):
            fingerprint = fingerprint_of_call(options, plan, packed)
            return send(options, _rows(q), (_rows(k), _rows(v)), plan, fingerprint)

        def by_batch(out):
            batch, tokens = self.qkv[0].shape[0], self.qkv[0].shape[1] // self.stopwatch.num_ranks
            return out.reshape(batch, tokens, *out.shape[-2:])

        of_whole = lambda q, k, v, *plan: attend(options, Operands(q, k, v), *plan).out
        whole = self.program(of_whole, of_call, _ROWS)
        total = max(self.stopwatch.run(whole, *self.qkv, *self.plan)[0])
        record = StepRecord(self.stopwatch)
        sending = self.program(sent, of_call, _BY_RANK)
        (received,) = record.step("send", communication=(sending, *self.qkv, *self.plan))
        computing = self.program(partial(attend_received, options), [_BY_RANK], _BY_RANK)
        ((out, *_),) = record.step("attend", computation=(computing, received))
        if return_output is not None:

            def returned(out, plan, packed):
                fingerprint = fingerprint_of_call(options, plan, packed)
                return return_output(options, out, plan, fingerprint)

            returning = self.program(returned, [_BY_RANK, *_PLAN], _BY_RANK)
            (out,) = record.step("return", communication=(returning, out, *self.plan))
        _, out = self.stopwatch.run(self.program(by_batch, [_BY_RANK], _ROWS), out)
        name = options.op.removesuffix("_profile")
        return AttentionProfile(name, total, tuple(record.steps), tuple(record.spans), out)


def _rows(x: Any) -> Any:
    return x.reshape(-1, *x.shape[2:])


def _call(
    op: str,
    stopwatch: Stopwatch,
    qkv: tuple[HostOrDevice, HostOrDevice, HostOrDevice],
    plan: AttentionPlan | PlacedPlan,
    given: dict[str, Any],
) -> _Call:
    """Checks the arguments and puts the arrays on the mesh."""
    axis_name = stopwatch.axis_name
    mask, documents, options = read_keywords(op, axis_name, given, {"scale", "logit_soft_cap"})
    check_rows(op, Operands(*qkv), *documents)
    check_tokens(op, qkv[0].shape[1], stopwatch)
    if is_stack(plan):
        raise ValueError(f"{op}: got stacked plans. Pass the plan of one batch.")
    if plan.world_size != stopwatch.num_ranks:
        raise ValueError(
            f"{op}: the plan is for world_size={plan.world_size} but {axis_name!r} has "
            f"{stopwatch.num_ranks} devices. Plan again with that world_size."
        )
    put = lambda tree, *axes: jax.device_put(tree, NamedSharding(stopwatch.mesh, P(*axes)))
    packed = PackedMask(read_mask_of_plan(op, mask, plan), *documents)
    qkv, packed = put((qkv, packed), None, axis_name)
    return _Call(stopwatch, options, qkv, (put(plan, axis_name), packed))
