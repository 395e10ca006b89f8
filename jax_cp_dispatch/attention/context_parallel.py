"""`context_parallel_attention`: attention over a mesh axis, on global arrays or on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Names
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Integer, PyTree

from jax_cp_dispatch._arguments import HostOrDevice, is_on_host
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName, check_axis_name, check_mesh
from jax_cp_dispatch._ranks.options import is_on_rank, read_options, vary_alike
from jax_cp_dispatch.attention.algorithms import Algorithm, refuse, run_unless_empty
from jax_cp_dispatch.attention.choose import Auto, read_algorithm
from jax_cp_dispatch.attention.local.ranges import check_softmax
from jax_cp_dispatch.attention.operands import (
    OP,
    Call,
    Operands,
    Outputs,
    check_rows,
    check_specs,
    has_no_tokens,
    read_operands,
    with_own_heads,
)
from jax_cp_dispatch.documents.documents import (
    Documents,
    check_call_ranks,
    read_given,
    read_whole,
    replaced,
    trusted,
    with_segment_ids,
    without_plan,
)
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS, normalize_segment_ids
from jax_cp_dispatch.global_call import (
    GivenAxes,
    MeshAxes,
    cut_tokens,
    explicit_axes,
    find_axes,
    on_all_ranks,
    pad_tokens,
)
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.masks.read import check_mask_arrays
from jax_cp_dispatch.planning.plan import check_groups, check_plan, is_of_all, is_stack


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
      v: values; None with `expand`.
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
      documents: what the tokens are, their order, and their plans; q, k and v are in this order. If
        the batch is sharded over D groups, plans are `stack_plans` of D plans, one for the rows of
        each. Documents or a mask in another order, and a plan of another batch, are errors: while
        the call is traced, or in the step, on all ranks.
      segment_ids: the short form for packed order: the document of each token, 0 = padding; None:
        each batch row is one document. Integers of any dtype, with the same meaning for every
        algorithm. Ids known on the host must not be negative; of traced ids, negative ones are
        padding. A document in several pieces in its batch row is an error: on the host if ids are
        known there, else on all ranks.
      positions: likewise, the position of each token in its document; None if segment ids alone
        separate the documents.
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
      expand: `f(weights, rows) -> (k, v)`, from rows `[R, ...]` to `[R, K, H]` and `[R, K, Hv]` in
        q's dtype. The latent rows move, and each rank expands those that it attends to, once per
        pass; in rings, at every step. It acts on each row alone, and closes over no traced array.
        Gradients of latent rows are summed over the ranks in float32.
      weights: a pytree of arrays, the same on all ranks of `axis_name`; their gradients are summed
        over all ranks.
      weight_specs: of global arrays: how weights are sharded over `head_axis`: a `PartitionSpec`
        for each, or for each part of the pytree. From its part, `expand` returns the device's part
        of the KV heads. None: weights are whole; each device expands all heads, and keeps those of
        its query heads. With "ulysses", then also over the axes that share the heads.
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
      jax.errors.JaxRuntimeError: at run time, on all ranks: tokens or masks are in another order, a
        plan was made for another batch, its capacities are too small, or a rank has the part of
        another rank or plan; or as `dispatch`. With `implementation="xla"` the output is NaN
        instead.
    """
    names = check_axis_name(OP, axis_name)
    check_mesh(OP, mesh)
    chosen = read_algorithm(OP, algorithm)
    follows_plan = chosen.follows_plan
    given = read_given(OP, documents, segment_ids, positions, mask, follows_plan=follows_plan)
    if given.plan is not None:
        check_plan(OP, given.plan)
        if given.order == PACKED and given.plan.is_placed:  # unplaced
            given = without_plan(OP, given)
    operands, expansion = read_operands(q, k, v, sink, (expand, weights, weight_specs))
    on_rank = is_on_rank(OP, names)
    moved = q, *operands.moved
    if on_rank:
        axes = explicit_axes(
            OP, *moved, others=(operands, given), covers_batch=is_of_all(given.plan)
        )
    else:
        given_axes = GivenAxes(mesh, axis_name, batch_axis, head_axis)
        axes = find_axes(OP, *moved, given=given_axes, covers_batch=is_of_all(given.plan))
    check_rows(OP, operands, given.segment_ids, given.positions)
    check_softmax(OP, scale, logit_soft_cap)
    check_mask_arrays(OP, given.mask, q.shape[:2])
    if axes is not None and expansion is not None:
        sharing = chosen.head_axes(axes.sequence)
        check_specs(OP, expansion, operands.weights, axes, sharing)
    exchange = {"deadline": deadline, "num_comm_sm": num_comm_sm}
    call = Call(
        read_options(OP, axis_name, implementation=implementation, **exchange),
        tuple(map(lax.axis_size, names)) if axes is None or on_rank else axes.sizes,
        q.shape[2] // (1 if axes is None else axes.num_devices(axes.heads)),
        order=given.order,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        expansion=expansion,
    )
    run: Callable[..., Outputs] = _on_rank if on_rank else _on_global_arrays
    return call.returned(run(chosen, call, operands, given, axes))


def _on_rank(
    algorithm: Algorithm | Auto,
    call: Call,
    operands: Operands,
    given: Documents,
    axes: MeshAxes | None,
) -> Outputs:
    """Computes attention of this rank's rows, which explicit axes may shard."""
    axis_name = call.exchange.axis_name
    num_tokens = operands.q.shape[1] * call.num_ranks
    ranks = f"axis {axis_name!r} has {call.num_ranks} ranks"
    check_call_ranks(OP, given, num_tokens, call.num_ranks, ranks)
    if given.plan is None:
        ids, positions = normalize_segment_ids(OP, given.segment_ids, given.positions)
        given = replaced(given, segment_ids=ids, positions=positions)
    if isinstance(algorithm, Auto):
        num_groups = 1 if axes is None else axes.num_groups
        sizes = {"num_tokens": num_tokens, "num_groups": num_groups}
        algorithm, plan = algorithm.choose(call, operands, given, **sizes)
        given = replaced(given, plans=() if plan is None else (plan,))
    refuse(algorithm, call, given.mask)
    if axes is None:
        return run_unless_empty(algorithm, call, operands, given)
    return _program(operands, given, algorithm=algorithm, call=call, axes=axes)


def _on_global_arrays(
    algorithm: Algorithm | Auto,
    call: Call,
    operands: Operands,
    given: Documents,
    axes: MeshAxes,
) -> Outputs:
    """Pads the tokens, plans what is known, and runs one program on all ranks."""
    (B, T), num_ranks, plan = operands.q.shape[:2], call.num_ranks, given.plan
    check_call_ranks(OP, given, T, num_ranks, axes.described)
    _check_plan(call, axes, T, plan)
    if not isinstance(algorithm, Auto):
        refuse(algorithm, call, given.mask)
    missing, documents = -T % num_ranks, given
    if plan is None:  # those with a plan were read
        documents = read_whole(OP, given, num_ranks)
        if missing:
            documents = pad_tokens(with_segment_ids(documents, (B, T)), missing)
    q, k, v = pad_tokens((operands.q, operands.k, operands.v), missing)
    operands = operands._replace(q=q, k=k, v=v)
    if isinstance(algorithm, Auto):
        sizes = {"num_tokens": T + missing, "num_groups": axes.num_groups}
        algorithm, plan = algorithm.choose(call, operands, documents, **sizes)
        refuse(algorithm, call, documents.mask)
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(documents))
    if plan is None and not (is_traced or axes.batch or has_no_tokens(operands)):
        plan = algorithm.plan_before(with_segment_ids(documents, (B, T + missing)), num_ranks)
    if plan is not None and given.plan is None:
        documents = trusted(mask=plan.mask, plans=(plan,))  # nothing to compare
    if all(map(is_on_host, jax.tree.leaves(replaced(documents, plans=())))):
        call = dataclasses.replace(call, checks_order=False)  # checked above
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
    of_plans = tuple(sequence if is_stack(x) else P(axes.sequence) for x in documents.plans)
    of_documents = replaced(
        documents, segment_ids=sequence, positions=sequence, mask=sequence, plans=of_plans
    )
    of_keys, of_weights = rows, P()
    if call.expansion is None:
        k, v = (axes.repeat_kv_heads(x, operands.q.shape[2]) for x in operands.moved)
        operands = operands._replace(k=k, v=v)
    else:
        of_keys, of_weights = sequence, call.expansion.specs
        sharing = algorithm.head_axes(axes.sequence)
        expansion = with_own_heads(call.op, call.expansion, operands, axes, sharing)
        call = dataclasses.replace(call, expansion=expansion)
    of_operands = Operands(rows, of_keys, of_keys, P(axes.heads), of_weights)
    out_specs = Outputs(
        rows,
        rows if call.return_lse else None,
        P(axes.heads) if call.return_max_logits else None,
    )

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
        in_specs=(*of_operands, of_documents),
        out_specs=out_specs,
        num_differentiable=len(operands),
    )


def _check_plan(call: Call, axes: MeshAxes, num_tokens: int, plan: Any) -> None:
    """Requires that order and plan match the tokens, the ranks and the other arguments."""
    if (plan is not None or call.order.layout == "zigzag") and num_tokens % axes.num_ranks:
        raise ValueError(
            f"{OP}: T is {num_tokens} but {axes.described}, which must divide it with a plan, and "
            "in zigzag order. Pad the tokens (segment 0 is padding) before you plan or reorder "
            "them."
        )
    if plan is not None and plan.world_size != axes.num_ranks:
        raise ValueError(
            f"{OP}: the plan is for world_size={plan.world_size} but {axes.described}. Plan again "
            "with that world_size."
        )
    if plan is not None:
        check_groups(OP, plan, num_groups=axes.num_groups, batch=axes.batch)
