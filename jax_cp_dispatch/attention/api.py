"""`context_parallel_attention`: attention over a mesh axis, from global arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Names
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Integer, PyTree

from jax_cp_dispatch._arguments import HostOrDevice, is_on_host
from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention.algorithms import Algorithm, Auto, Balanced, read_algorithm
from jax_cp_dispatch.attention.auto import choose_for_call
from jax_cp_dispatch.attention.check_arguments import check_global, check_rows, read_mask_of_plan
from jax_cp_dispatch.attention.expanded_heads import check_specs
from jax_cp_dispatch.attention.latents import Expansion, read_latents
from jax_cp_dispatch.attention.local.check_operands import check_arrays
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.peer_arguments import explains_peer_arguments
from jax_cp_dispatch.attention.program import GlobalOptions, attend_global
from jax_cp_dispatch.documents.on_host import check_known_mask, read_sequences
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.documents.segment_ids import fold_to_int32
from jax_cp_dispatch.global_call.mesh_axes import Caller, GivenAxes, find_axes
from jax_cp_dispatch.global_call.padding import cut_tokens, pad_tokens
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import (
    check_mask_arrays,
    read_mask,
)
from jax_cp_dispatch.planner import Plan
from jax_cp_dispatch.planner.stack import check_groups, is_stack

_OP = "context_parallel_attention"
_ON_A_RANK = {
    "balanced": "balanced_attention with a plan of plan_attention",
    "placed": "placed_attention with the plan of place_tokens",
    "ring": "ring_attention",
    "zigzag": "zigzag_ring_attention",
    "hamilton": "hamilton_attention",
    "ulysses": "ulysses_attention",
}


@explains_peer_arguments
def context_parallel_attention(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"] | PyTree[HostOrDevice],
    v: Float[HostOrDevice, "B T K Hv"] | None = None,
    *,
    axis_name: AxisName,
    algorithm: Algorithm | str,
    mesh: Mesh | AbstractMesh | None = None,
    mask: Mask | str | None = None,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    layout: str = "contiguous",
    plan: Plan | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    sink: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    expand: Callable[..., Any] | None = None,
    weights: PyTree[HostOrDevice] = None,
    weight_specs: Any = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> Float[Array, "B T N Hv"] | Any:
    """Computes attention over packed documents, with the sequence sharded over a mesh axis.

    Call outside `jax.shard_map`, under `jit` or not, with global arrays. Differentiable once, in
    reverse mode.

    "balanced" makes a plan from the segment ids. Concrete ids are planned immediately, with buffers
    of the size that this batch needs; to plan at another time, pass the plan of `plan_attention`.
    Traced ids or masks (and those of a sharded batch) are planned inside the program, with the
    capacities of `Balanced.config`; its defaults always suffice, but reserve space for all keys on
    every rank. "placed" needs the plan of `place_tokens`, and q, k, v in its order, which is also
    the order of the output. The other algorithms need no plan.

    Args:
      q: queries, T tokens, sharded or to be sharded over `axis_name` in equal contiguous parts.
      k: keys; K divides N. With `expand`, latent rows instead: a pytree of arrays `[B, T, ...]`.
      v: values; None with `expand`.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first; W
        devices together. If W does not divide T, padding is added and removed.
      algorithm: `Balanced()`, `Ring()`, `Zigzag()`, `Hamilton()`, `Ulysses()`, `Placed()` or
        `Auto()`, with its own options; or its name in lower case, for all defaults. "auto" selects
        the algorithm of the plan, or chooses like `choose_algorithm`, from concrete segment ids;
        for a mask with arrays it takes "balanced", or "ring" if that does not fit.
      mesh: the mesh; None selects the mesh of `jax.set_mesh`, or that of the arrays or, with
        explicit axes, of their types.
      mask: which keys of its document a token sees: "causal", "full", or an object of
        `jax_cp_dispatch.masks`, for example `SlidingWindow(1024)`. None is causal, or the plan's.
      segment_ids: the document of each token, 0 = padding; None: each batch row is one document.
        Integers of any dtype, with the same meaning for every algorithm. Ids known on the host must
        not be negative; of traced ids, negative ones are padding. A document in several pieces in
        its batch row is an error: on the host if ids are known there, else on all ranks.
      positions: the position of each token in its document; None if segment ids alone separate the
        documents.
      layout: "contiguous": tokens are in order. "zigzag": tokens are in the order of
        `zigzag_permutation`; W must divide T.
      plan: for "balanced", a plan for these documents; for "placed", that of `place_tokens`. It is
        for one mask; another one is refused. If you also pass segment_ids, or these and positions
        (for "placed" in placed order), they are compared with the plan's, and a plan of another
        batch is an error on all ranks; without them, the batch is not compared. If the batch is
        sharded over D groups, pass `stack_plans` of D plans, one for the rows of each group.
      batch_axis: mesh axis over which B is sharded, or several; groups along them are independent.
        `()`: none. None: inferred from q, k and v. Types show explicit axes. Automatic axes are
        known only for placed arrays outside `jit`; otherwise a warning asks for the name. Arrays
        are gathered over axes that are not named.
      head_axis: the same for N and K. If its devices do not divide K, KV heads are repeated.
      sink: a learned logit for each query head, without a value: it adds `exp(sink)` to the
        denominator of each row with keys. Differentiable; gradients are summed over all ranks.
      return_lse: also return `lse` `[B, T, N]`, differentiable: the logarithm of the denominator
        (with the sink), in float32 (float64 for float64), -inf for padding.
      return_max_logits: also return the largest logit of each head `[N]`, of all ranks and rows,
        scaled and capped, without the sink and without derivative. The result is then `(out, lse)`,
        `(out, max_logits)` or `(out, lse, max_logits)`.
      expand: `f(weights, rows) -> (k, v)`, from rows `[R, ...]` to `[R, K, H]` and `[R, K, Hv]` in
        q's dtype. The latent rows move, and each rank expands those that it attends to, once per
        pass; in rings, at every step. It acts on each row alone, and closes over no traced array.
        Not for "ulysses". Gradients of latent rows are summed over the ranks in float32.
      weights: a pytree of arrays, the same on all ranks of `axis_name`; their gradients are summed
        over all ranks.
      weight_specs: how weights are sharded over `head_axis`: a `PartitionSpec` for each, or for
        each part of the pytree. From its part, `expand` returns the device's part of the KV heads.
        None: weights are whole; each device expands all heads, and keeps those of its query heads.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation: of the exchanges; None selects one.
      deadline: seconds until an exchange gives up on a missing rank; None is 60, on GPUs 600, or
        `JAX_CP_DISPATCH_DEADLINE`. No effect with "xla".
      num_comm_sm: multiprocessors of a GPU that each exchange may use; see `dispatch`.
    Returns:
      The output, sharded as q, in q's dtype; zero for padding.
    Raises:
      TypeError, ValueError: an axis, a size or an option is invalid; the message says how to fix
        it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    check_global(_OP, mesh=mesh, axis_name=axis_name, plan=plan)
    algorithm = read_algorithm(_OP, algorithm)
    operands, expansion = _read_operands(q, k, v, sink, (expand, weights, weight_specs))
    axes = find_axes(
        *(q, *operands.moved),
        caller=Caller(_OP, _ON_A_RANK.get(algorithm.name) or ", or ".join(_ON_A_RANK.values())),
        given=GivenAxes(mesh, axis_name, batch_axis, head_axis),
        covers_batch=plan is not None and not is_stack(plan),
    )
    check_rows(_OP, operands, segment_ids, positions)
    if expansion is not None:
        check_specs(_OP, expansion, operands.weights, axes)
    attention = AttentionOptions(
        read_options(
            _OP,
            axes.axis_name,
            implementation=implementation,
            deadline=deadline,
            num_comm_sm=num_comm_sm,
        ),
        layout=layout,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        expansion=expansion,
    )
    options = GlobalOptions(axes, algorithm, attention)
    _check_plan(options, q, plan)
    attended = read_mask(_OP, mask) if plan is None else read_mask_of_plan(_OP, mask, plan)
    check_mask_arrays(_OP, attended, q.shape[:2])
    _check_choice(options, plan)
    if plan is None:
        segment_ids, positions = read_sequences(
            _OP, segment_ids, positions, layout=layout, num_ranks=options.num_ranks
        )
        known = PackedMask(attended, segment_ids, positions)
        check_known_mask(_OP, known, layout=layout, num_ranks=options.num_ranks)
    else:
        segment_ids, positions = (
            fold_to_int32(x) if x is not None and is_on_host(x) else x
            for x in (segment_ids, positions)
        )
    num_tokens = q.shape[1]
    missing = -num_tokens % options.num_ranks
    has_plan = plan is not None
    if missing and segment_ids is None and not has_plan:
        segment_ids = np.ones(q.shape[:2], np.int32)
    q, k, v = pad_tokens((q, operands.k, operands.v), missing)
    operands = operands._replace(q=q, k=k, v=v)
    documents = segment_ids, positions, attended
    segment_ids, positions, attended = pad_tokens(documents, missing)
    packed = PackedMask(attended, segment_ids, positions)
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(packed))
    if isinstance(algorithm, Auto):
        algorithm, plan = choose_for_call(options, algorithm, operands, packed, plan)
        options = dataclasses.replace(options, algorithm=algorithm)
        _check_choice(options, plan)
    if isinstance(algorithm, Balanced) and plan is None:
        if segment_ids is None:
            packed = packed._replace(segment_ids=np.ones(operands.q.shape[:2], np.int32))
        if not (is_traced or axes.batch):
            plan = options.plan(packed, algorithm.config)
    if plan is not None and not has_plan:
        packed = PackedMask(plan.mask)  # nothing to compare
    if all(map(is_on_host, jax.tree.leaves(packed))):
        attention = dataclasses.replace(attention, checks_order=False)  # checked above
        options = dataclasses.replace(options, attention=attention)
    outputs = attend_global(operands, plan, packed, options=options)
    if missing:
        out, lse = cut_tokens((outputs.out, outputs.lse), num_tokens, axes.mesh)
        outputs = outputs._replace(out=out, lse=lse)
    return attention.returned(outputs)


def _read_operands(q, k, v, sink, expanding) -> tuple[Operands, Expansion | None]:
    """Checks the arrays, with what expands them."""
    if expanding[0] is None:
        if v is None:
            raise TypeError(f"{_OP}: v is missing. Pass k and v, or latent rows with expand=.")
        if any(x is not None for x in expanding):
            raise TypeError(f"{_OP}: got weights or weight_specs without expand. Pass it too.")
        check_arrays(_OP, q=q, k=k, v=v)
        return Operands(q, k, v, sink), None
    if v is not None:
        raise TypeError(f"{_OP}: got v with expand. Pass latent rows in place of k, and no v.")
    latents = read_latents(_OP, q, k, *expanding)
    return Operands(q, latents.rows, None, sink, latents.weights), latents.expansion


def _check_choice(options: GlobalOptions, plan) -> None:
    """Requires that the algorithm supports the options."""
    attention, name = options.attention, options.algorithm.name
    if name in ("balanced", "placed") and attention.layout != "contiguous":
        raise ValueError(
            f"{_OP}: algorithm={name!r} needs tokens in contiguous order; got "
            f"layout={attention.layout!r}. Choose another algorithm."
        )
    if name == "ulysses" and attention.expansion is not None:
        raise ValueError(
            f"{_OP}: got expand with algorithm='ulysses', which moves heads. Pass "
            "algorithm='balanced', 'placed', 'ring' or 'zigzag'."
        )
    if name == "placed" and (plan is None or not plan.is_placed):
        got = "none" if plan is None else "one that moves queries"
        raise ValueError(
            f"{_OP}: algorithm='placed' needs the plan of a placement, got {got}. "
            "Pass plan=place_tokens(...).plan, and q, k, v in placed order."
        )
    if name == "balanced" and plan is not None and plan.is_placed:
        raise ValueError(
            f"{_OP}: got the plan of a placement with algorithm='balanced'. Pass "
            "algorithm='placed', and q, k, v in placed order."
        )
    if name not in ("balanced", "placed", "auto") and plan is not None:
        raise ValueError(
            f"{_OP}: got a plan with algorithm={name!r}; only 'balanced' and 'placed' follow a "
            "plan. Pass segment_ids instead."
        )


def _check_plan(options: GlobalOptions, q, plan) -> None:
    """Requires that layout and plan match the tokens, the ranks and the other arguments."""
    axes, num_ranks = options.axes, options.num_ranks
    if (plan is not None or options.attention.layout == "zigzag") and q.shape[1] % num_ranks:
        raise ValueError(
            f"{_OP}: T is {q.shape[1]} but {axes.described}, which must divide it with a plan, and "
            "with layout='zigzag'. Pad the tokens (segment 0 is padding) before you plan or "
            "reorder them."
        )
    if plan is not None and plan.world_size != num_ranks:
        raise ValueError(
            f"{_OP}: the plan is for world_size={plan.world_size} but {axes.described}. Plan again "
            "with that world_size."
        )
    if plan is not None:
        check_groups(_OP, plan, num_groups=axes.num_groups, batch=axes.batch)
