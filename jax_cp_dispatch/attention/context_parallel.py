"""`context_parallel_attention`: attention over a mesh axis, on global arrays or on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Names
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Integer, PyTree

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import is_traced, read_options, vary_alike
from jax_cp_dispatch.attention.algorithms import Algorithm, refuse, run_unless_empty
from jax_cp_dispatch.attention.choose import Auto, read_algorithm
from jax_cp_dispatch.attention.local.picked import read_picks
from jax_cp_dispatch.attention.local.ranges import check_softmax
from jax_cp_dispatch.attention.operands import (
    OP,
    Call,
    Operands,
    Outputs,
    check_operand_rows,
    check_specs,
    key_shapes,
    read_operands,
    with_own_heads,
)
from jax_cp_dispatch.documents.documents import (
    Documents,
    read_given,
    trusted,
    with_segment_ids,
    without_plan,
)
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS
from jax_cp_dispatch.global_call import (
    MeshAxes,
    cut_tokens,
    find_axes,
    fit_documents,
    on_all_ranks,
    pad_tokens,
)
from jax_cp_dispatch.masks import Mask, Selected
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.masks.read import check_mask_arrays
from jax_cp_dispatch.planning.plan import check_plan


@door(
    OP,
    v="For queries and keys of different lengths, use local_attention on one device.",
    sink="Pass one logit per query head.",
    **STEPS_OF_DOCUMENTS,
)
def context_parallel_attention(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"] | PyTree[HostOrDevice],
    v: Float[HostOrDevice, "B T K Hv"] | None = None,
    *,
    axis_name: AxisName,
    algorithm: Algorithm | Auto | str,
    mesh: Mesh | AbstractMesh | None = None,
    mask: Mask | str | None = None,
    documents: Documents | None = None,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    sink: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    expand: Callable[..., Any] | None = None,
    weights: PyTree[HostOrDevice] = None,
    weight_specs: Any = None,
    value_size: int | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> Float[Array, "B T N Hv"] | Any:
    """Computes attention over packed documents, with the sequence sharded over a mesh axis.

    Call on global arrays, under `jit` or not, or inside `jax.shard_map` over `axis_name`, on every
    rank, with the rank's columns of q, k, v, documents and masks (`in_specs=documents.specs(...)`).
    Differentiable once, in reverse mode; what remains in memory for the backward pass, and what
    moves, is said with each algorithm.

    "balanced" makes a plan from the documents. Known ones are planned immediately, with buffers of
    the size that this batch needs; to plan at another time, pass `documents.with_plan(plan)`.
    Traced documents or masks (and those of a sharded batch) are planned inside the program, with
    the capacities of `Balanced.config`; its defaults always suffice, but reserve the keys that the
    mask can need, which `Balanced` counts. "placed" needs `Placement.documents`, and q, k, v in
    that order, which is also the order of the output.

    Args:
      q: queries, T tokens, sharded or to be sharded over `axis_name` in equal contiguous parts;
        bfloat16, float16, float32 or float64, as k and v.
      k: keys; K divides N. With `expand`, latent rows instead: a pytree of arrays `[B, T, ...]`.
      v: values; None with `expand` or `value_size`.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first; W
        devices together. If W does not divide T, padding is added and removed.
      algorithm: `Balanced()`, `Ring()`, `Zigzag()`, `Halo()`, `Hamilton()`, `Ulysses()`,
        `Placed()` or `Auto()`, with its options; or its name in lower case. "auto" selects the
        algorithm of the plan, or chooses like `choose_algorithm`, from concrete segment ids; for a
        mask whose arrays are traced it takes "balanced", or "zigzag" in that order.
      mesh: of global arrays; None selects the mesh of `jax.set_mesh`, or that of the arrays or,
        with explicit axes, of their types.
      mask: which keys of its document a token sees: "causal", "full", or an object of
        `jax_cp_dispatch.masks`, for example `SlidingWindow(1024)`. None is causal, or the plan's.
        `Selected(picks, ...)`: the keys that each query has picked. It needs "placed", "balanced",
        "halo", or "auto"; plans are those of the mask within which the picks were made. Picks that
        cannot be of these tokens are an error in the step, on all ranks.
      documents: what the tokens are, their order, and their plans; q, k and v are in this order. If
        the batch is sharded over D groups, plans are `stack_plans` of D plans, one for the rows of
        each. Documents or a mask in another order, and a plan of another batch, are errors: while
        the call is traced, or in the step, on all ranks.
      segment_ids: the short form for packed order: the document of each token, 0 = padding; None:
        each batch row is one document. Integers of any dtype, with the same meaning for every
        algorithm. Ids known on the host must not be negative; of traced ids, negative ones are
        padding. A document in several pieces in its batch row is an error: on the host if ids are
        known there, else on all ranks.
      positions: the position of each token in its document, which also ends where they do not
        increase. None: segment ids alone separate the documents.
      batch_axis: of global arrays: mesh axis over which B is sharded, or several; groups along them
        are independent. `()`: none. None: inferred from q, k and v. Types show explicit axes.
        Automatic axes are known only for placed arrays outside `jit`; otherwise a warning asks for
        the name. Arrays are gathered over axes that are not named.
      head_axis: the same for N and K. If its devices do not divide K, KV heads are repeated.
      sink: a learned logit for each query head, without a value: it adds `exp(sink)` to the
        denominator of each row with keys. Differentiable; gradients are summed over all ranks.
      return_lse: also return `lse` `[B, T, N]`, differentiable: the logarithm of the denominator
        (with the sink), in float32 (float64 for float64), -inf for padding.
      return_max_logits: also return the largest logit of each head `[N]`, of all ranks and rows
        (inside `jax.shard_map`, of the ranks of `axis_name`), scaled and capped, without the sink
        and without derivative. The result is then `(out, lse)`, `(out, max_logits)` or `(out, lse,
        max_logits)`.
      expand: a function `(weights, rows) -> (k, v)`, from latent rows `[R, ...]` to keys
        `[R, K, H]` and values `[R, K, Hv]` in q's dtype. It must expand each row alone, and close
        over no traced array. Latent rows move in place of keys; each rank expands those that it
        attends to, once per pass, and in rings at every step. Gradients of latent rows are summed
        over the ranks in float32.
      weights: a pytree of arrays, the same on all ranks of `axis_name`; their gradients are summed
        over all ranks.
      weight_specs: for global arrays: a `PartitionSpec` for each array of weights, or for each part
        of the pytree, that shards the weights over `head_axis`. From its part of the weights, a
        device then expands its part of the KV heads. None: each device expands all heads from whole
        weights, and keeps those of its query heads. With "ulysses", which shares the heads over
        axes of the ranks, specs may name these too, after those of `head_axis`.
      value_size: Hv of values that are the first features of the keys, as in absorbed MLA; pass no
        v. The keys move once, and their gradients are of both.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation: of the exchanges; None selects one.
      deadline: seconds until an exchange gives up on a missing rank; None is 60, on GPUs 43200
        (600 in a job of one process), or `JAX_CP_DISPATCH_DEADLINE`. No effect with "xla".
      num_comm_sm: multiprocessors of a GPU that each exchange may use; see `dispatch`.
    Returns:
      The output, sharded as q, in q's dtype; zero for padding.
    Raises:
      TypeError, ValueError: an axis, a size or an option is invalid; the message says how to fix
        it.
      jax.errors.JaxRuntimeError: at run time, on all ranks: tokens or masks are in another order, a
        plan was made for another batch, its capacities are too small, or a rank has the part of
        another rank or plan; or as `dispatch`. With `implementation="xla"` the output is NaN
        instead.
    """
    exchange = read_options(OP, axis_name, mesh, implementation, deadline, num_comm_sm)
    chosen = read_algorithm(OP, algorithm)
    follows_plan = chosen.follows_plan
    given = read_given(OP, documents, segment_ids, positions, mask, follows_plan=follows_plan)
    if given.plan is not None:
        check_plan(OP, given.plan)
        if given.order == PACKED and given.plan.is_placed:  # unplaced
            given = without_plan(OP, given)
    expanding = expand, weights, weight_specs
    operands, expansion = read_operands(q, k, v, sink, expanding, value_size)
    if isinstance(mask, Selected):
        num_kv_heads = key_shapes(expansion, operands)[0].shape[2]
        operands = operands._replace(picks=read_picks(OP, mask, q.shape, num_kv_heads))
    axes = find_axes(
        *(exchange, q, *operands.moved),
        batch_axis=batch_axis,
        head_axis=head_axis,
        others=(operands, given),
        plan=given.plan,
    )
    check_operand_rows(OP, operands, given.segment_ids, given.positions)
    check_softmax(OP, scale, logit_soft_cap)
    check_mask_arrays(OP, given.mask, q.shape[:2])
    if axes.manual and expansion is not None:
        sharing = chosen.head_axes(axes.sequence)
        check_specs(expansion, operands.weights, axes, sharing)
    call = Call(
        exchange,
        tuple(axes.mesh.shape[name] for name in axes.ranks),
        q.shape[2] // axes.num_devices(axes.heads),
        order=given.order,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        expansion=expansion,
    )
    if isinstance(mask, Selected):
        call = dataclasses.replace(call, pick_block=mask.block)
    out, lse, max_logits = run_call(chosen, call, operands, given, axes)
    asked = [lse] if return_lse else []
    asked += [max_logits] if return_max_logits else []
    return (out, *asked) if asked else out


def run_call(
    algorithm: Algorithm | Auto,
    call: Call,
    operands: Operands,
    documents: Documents,
    axes: MeshAxes,
) -> Outputs:
    """Runs a checked call: on global arrays, pads the tokens, and plans what is known."""
    B, T = jax.tree.leaves(operands.q)[0].shape[:2]
    documents, missing, checks_order = fit_documents(OP, documents, axes, (B, T))
    call = dataclasses.replace(call, checks_order=checks_order)
    rows = operands.q, operands.k, operands.v, operands.picks
    q, k, v, picks = pad_tokens(rows, missing)
    operands = operands._replace(q=q, k=k, v=v, picks=picks)
    if isinstance(algorithm, Auto):
        algorithm, documents = algorithm.choose(call, operands, documents, axes)
    refuse(algorithm, call, documents.mask)
    is_known = bool(axes.sequence) and not is_traced(jax.tree.leaves(documents))
    if documents.plan is None and is_known and not axes.batch and B * T:
        known = with_segment_ids(documents, (B, T + missing))
        if (plan := algorithm.plan_before(known, call.num_ranks)) is not None:
            documents = trusted(mask=plan.mask, plans=(plan,))  # nothing to compare
    if not axes.manual:
        return run_unless_empty(algorithm, call, operands, documents)
    outputs = _program(operands, documents, algorithm=algorithm, call=call, axes=axes)
    if missing:
        out, lse = cut_tokens((outputs.out, outputs.lse), T, axes.mesh)
        outputs = outputs._replace(out=out, lse=lse)
    return outputs


@partial(jax.jit, static_argnames=("algorithm", "call", "axes"))
def _program(
    operands: Operands,
    documents: Documents,
    *,
    algorithm: Algorithm,
    call: Call,
    axes: MeshAxes,
) -> Outputs:
    sequence = axes.rows
    rows = P(*sequence, axes.heads)
    of_keys, of_weights, of_picks = rows, P(), sequence
    if call.local is not None:  # groups of heads are sharded, and what is for all of them is not
        of_keys = jax.tree.map(lambda x: rows if x.shape[2] > 1 else sequence, operands.k)
    elif call.expansion is None:
        k, v = (axes.repeat_kv_heads(x, operands.q.shape[2]) for x in operands.moved)
        operands = operands._replace(k=k, v=v)
    else:
        of_keys, of_weights = sequence, call.expansion.specs
        sharing = algorithm.head_axes(axes.sequence)
        expansion = with_own_heads(call.expansion, operands, axes, sharing)
        call = dataclasses.replace(call, expansion=expansion)
    if call.pick_block and operands.picks.shape[2] > 1:
        picks, of_picks = axes.repeat_kv_heads(operands.picks, operands.q.shape[2]), rows
        operands = operands._replace(picks=picks)
    of_operands = Operands(rows, of_keys, rows, P(axes.heads), of_weights, of_picks)
    lse_rows = rows if call.return_lse else None
    out_specs = Outputs(rows, lse_rows, P(axes.heads) if call.return_max_logits else None)

    def attend_on_rank(*sharded: Any) -> Outputs:
        *arrays, documents = sharded
        outputs = run_unless_empty(algorithm, call, Operands(*arrays), documents)
        if outputs.max_logits is None or not axes.batch:
            return outputs
        (largest,) = vary_alike([lax.stop_gradient(outputs.max_logits)], also=axes.batch)
        return outputs._replace(max_logits=lax.pmax(largest, axes.batch))

    return on_all_ranks(
        attend_on_rank,
        (*operands, documents),
        axes=axes,
        in_specs=(*of_operands, documents.specs(axes.sequence, axes.batch)),
        out_specs=out_specs,
        num_differentiable=len(operands) - 1,
    )
