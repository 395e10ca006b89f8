"""`context_parallel_attention`: attention over a mesh axis, from global arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P, reshard
from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.deadline import check_deadline
from jax_cp_dispatch._ranks.implementations import check_implementation
from jax_cp_dispatch._ranks.varying import can_check_varying
from jax_cp_dispatch._window import Window, reach
from jax_cp_dispatch.attention.checks import check_arrays, check_global, check_layout
from jax_cp_dispatch.attention.choose import (
    ALGORITHMS as PREDICTED,
    choose_algorithm,
    document_lengths,
)
from jax_cp_dispatch.attention.local.options import check_softmax
from jax_cp_dispatch.attention.mesh_axes import MeshAxes, find_axes
from jax_cp_dispatch.attention.planned.balanced import attend_balanced
from jax_cp_dispatch.attention.planned.placed import attend_placed
from jax_cp_dispatch.attention.rotating.hamilton import hamilton_schedule
from jax_cp_dispatch.attention.rotating.layout import zigzag_permutation
from jax_cp_dispatch.attention.rotating.ring import ring_schedule
from jax_cp_dispatch.attention.rotating.schedules import Transport
from jax_cp_dispatch.attention.rotating.sequence import (
    HostOrDevice,
    Sequence,
    attend_sequence,
    check_rows,
    read_sequences,
)
from jax_cp_dispatch.planner import AttentionPlan, PlacedPlan, PlanConfig, plan_attention
from jax_cp_dispatch.planner.segment_ids import is_on_host, words

_OP = "context_parallel_attention"
ALGORITHMS = (*PREDICTED, "placed", "auto")


@dataclasses.dataclass(frozen=True)
class _Options:
    axes: MeshAxes
    algorithm: str
    causal: bool
    window: Window | None
    layout: str
    nodes: int | None
    config: PlanConfig
    scale: float | None
    logit_soft_cap: float | None
    implementation: str | None
    deadline: float | None

    @property
    def axis_name(self) -> str:
        return self.axes.axis_name

    @property
    def num_ranks(self) -> int:
        return self.axes.mesh.shape[self.axis_name]

    def keywords(self, *names: str) -> dict[str, Any]:
        """Those options as keywords."""
        return {name: getattr(self, name) for name in names}


def context_parallel_attention(
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T K Hv"],
    *,
    axis_name: str,
    algorithm: str,
    mesh: Mesh | AbstractMesh | None = None,
    causal: bool = True,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    layout: str = "contiguous",
    window: Window | None = None,
    plan: AttentionPlan | PlacedPlan | None = None,
    config: PlanConfig = PlanConfig(),
    nodes: int | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention over packed documents, the sequence sharded over a mesh axis.

    Call outside `jax.shard_map`, under `jit` or not, with global arrays. Differentiable once, in
    reverse mode.

    "balanced" needs a plan, which comes from the segment ids. Concrete ids are planned at once,
    with buffers as large as this batch needs; pass the plan of `plan_attention` in to choose when.
    Traced ids (and those of a batch that is sharded itself) are planned inside the program, with
    the capacities of `config`, whose defaults always fit but give every rank room for all keys.
    "placed" needs the plan of `place_tokens`, and q, k, v in its order; the output is in it, too.
    The others plan nothing.

    Args:
      q: queries, T tokens, sharded or to be sharded over `axis_name` in equal contiguous parts.
      k: keys; K divides N.
      v: values.
      axis_name: the mesh axis over which the sequence is sharded, W devices. If W does not divide
        T, padding is added and taken away.
      algorithm: "balanced": every rank computes an equal share of the query-key pairs of the
        documents, see `balanced_attention`; "ring", "zigzag", "hamilton": keys go round, see
        `ring_attention`, `zigzag_ring_attention`, `hamilton_attention`; "placed": tokens live where
        `place_tokens` has put them, keys and values travel, see `placed_attention`; "auto": that of
        the plan, or `choose_algorithm` from concrete segment ids.
      mesh: the mesh; None is the one set by `jax.set_mesh`, or the one on which the arrays lie or,
        with explicit axes, that their types name.
      causal: a token attends what stands before it in its document, and itself; else all of it.
      segment_ids: the document of each token, 0 = padding; None: each batch row is one document.
        Integers of any dtype. Those known on the host are checked: an id is not negative, and
        its tokens stand together in their batch row. Of traced ones, negative is padding, and each
        run of an id is a document. The same for every algorithm.
      positions: the place of each token in its document; None if the segment ids tell documents
        apart.
      layout: "contiguous": tokens are in order; "zigzag": in that of `zigzag_permutation`, and W
        divides T.
      window: with `causal`, an int: a token attends at most that many tokens of its document,
        itself the last. Without, a pair (left, right), see `ring_attention`.
      plan: for "balanced", a plan for these documents and the window. Given together with
        segment_ids or positions, they are compared with what it was made from, and a plan of
        another batch is an error on all ranks; given alone, it is followed unseen.
        For "placed", that of `place_tokens`, alone.
      config: for "balanced", block size and capacities of plans made here.
      nodes: for "hamilton", see there.
      batch_axis: mesh axis over which B is sharded, or several; each of their groups attends for
        itself. `()`: none. None: the ones over which q, k or v is sharded. Types tell explicit
        axes; of automatic ones only placed arrays outside of `jit` tell, and a warning asks for
        the name elsewhere. Over axes that nobody names, arrays are gathered.
      head_axis: likewise for N and K. Where its devices do not divide K, KV heads are repeated.
      scale: factor on the logits; None is `1 / sqrt(H)`.
      logit_soft_cap: c > 0 replaces a scaled logit x with `c * tanh(x / c)`.
      implementation: of the exchanges; None chooses.
      deadline: seconds until an exchange gives up on a rank that has not come; None is 60. Not with
        "xla".
    Returns:
      The output, sharded as q, in q's dtype; zero for padding.
    Raises:
      TypeError, ValueError: an axis, a size or a choice does not fit; what, and what to do.
      jax.errors.JaxRuntimeError: when the program runs, see `dispatch`.
    """
    check_global(_OP, mesh=mesh, axis_name=axis_name, plan=plan, config=config)
    check_arrays(_OP, q=q, k=k, v=v, segment_ids=segment_ids, positions=positions)
    check_rows(_OP, q, k, v)
    axes = find_axes(
        *(q, k, v),
        mesh=mesh,
        axis_name=axis_name,
        batch_axis=batch_axis,
        head_axis=head_axis,
        algorithm=algorithm,
        has_plan=plan is not None,
    )
    check_rows(_OP, q, k, v, segment_ids, positions)
    _check_plan(q, axes, plan, layout, window)
    options = _Options(
        axes,
        algorithm=algorithm,
        causal=causal,
        window=window,
        layout=layout,
        nodes=nodes,
        config=config,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        implementation=implementation,
        deadline=deadline,
    )
    _check_choice(options, plan)
    if isinstance(plan, PlacedPlan) and not (segment_ids is None and positions is None):
        raise ValueError(
            f"{_OP}: got segment_ids or positions with the plan of a placement, which knows its "
            "documents. Omit them."
        )
    if plan is None:
        segment_ids, positions = read_sequences(
            _OP, segment_ids, positions, layout=layout, num_ranks=options.num_ranks
        )
    else:
        segment_ids, positions = (
            words(x) if x is not None and is_on_host(x) else x for x in (segment_ids, positions)
        )
    if algorithm == "auto":
        options = _choose(options, q, k, segment_ids, positions, plan)
        _check_choice(options, plan)
    num_tokens = q.shape[1]
    missing = -num_tokens % options.num_ranks
    needs_ids = options.algorithm == "balanced" or missing > 0
    if needs_ids and segment_ids is None and plan is None:
        segment_ids = np.ones(q.shape[:2], np.int32)
    q, k, v, segment_ids, positions = (_pad(x, missing) for x in (q, k, v, segment_ids, positions))
    is_traced = any(isinstance(x, Tracer) for x in (segment_ids, positions))
    plans_here = options.algorithm == "balanced" and not is_traced and not axes.batch
    if plans_here and plan is None and segment_ids is not None:
        plan = plan_attention(
            segment_ids,
            positions,
            world_size=options.num_ranks,
            window=cast(int | None, window),
            config=config,
        )
        segment_ids = positions = None  # nothing to compare
    out = _attend(q, k, v, plan, (segment_ids, positions), options=options)
    return out[:, :num_tokens] if missing else out


def _choose(options: _Options, q, k, segment_ids, positions, plan) -> _Options:
    """The options with "auto" replaced."""
    if plan is not None:
        name = "placed" if isinstance(plan, PlacedPlan) else "balanced"
        return dataclasses.replace(options, algorithm=name)
    if any(isinstance(x, Tracer) for x in (segment_ids, positions)):
        raise ValueError(
            f"{_OP}: algorithm='auto' reads segment_ids on the host, but they are traced. Call "
            "choose_algorithm outside of jit, once for batches that are alike, and pass its result."
        )
    # The rows of the first group stand for all.
    rows = max(q.shape[0] // options.axes.num_groups, 1)
    lengths = ((q.shape[1],),) * rows
    if segment_ids is not None or positions is not None:
        ids = np.ones(q.shape[:2], np.int32) if segment_ids is None else segment_ids
        order = slice(None)
        if options.layout == "zigzag":
            order = zigzag_permutation(q.shape[1], options.num_ranks, inverse=True)
        places = None if positions is None else np.asarray(positions)[:rows, order]
        lengths = document_lengths(np.asarray(ids)[:rows, order], places)
    head_devices = options.axes.num_devices(options.axes.heads)
    num_kv_heads = k.shape[2] * options.axes.kv_copies(q.shape[2], k.shape[2])
    choice = choose_algorithm(
        lengths,
        num_ranks=options.num_ranks,
        tokens_per_rank=-(-q.shape[1] // options.num_ranks),
        num_heads=q.shape[2] // head_devices,
        num_kv_heads=num_kv_heads // head_devices,
        head_size=q.shape[3],
        itemsize=q.dtype.itemsize,
        **options.keywords("causal", "window", "layout"),
    )
    return dataclasses.replace(options, algorithm=choice.algorithm, nodes=choice.nodes)


def _pad(x: Any, missing: int) -> Any:
    """Tokens in segment 0 at the end, so that all ranks hold equally many."""
    if x is None or not missing:
        return x
    pad = np.pad if isinstance(x, np.ndarray) else jnp.pad  # what is known under jit stays so
    return pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


@partial(jax.jit, static_argnames="options")
def _attend(q, k, v, plan, documents, *, options: _Options):
    axes = options.axes
    sequence = P(axes.batch, axes.axis_name)
    rows = P(*sequence, axes.heads)
    in_specs = (rows, rows, rows, P(axes.axis_name), sequence)
    attend = jax.shard_map(
        partial(_local, options),
        mesh=axes.mesh,
        in_specs=in_specs,
        out_specs=rows,
        axis_names=axes.manual,
        check_vma=can_check_varying(),
    )
    k, v = (axes.repeat_kv_heads(x, q.shape[2]) for x in (k, v))
    operands = (q, k, v, plan, documents)
    if AxisType.Explicit in axes.mesh.axis_types:  # there, shard_map moves nothing by itself
        shardings = [NamedSharding(axes.mesh, spec) for spec in in_specs]
        operands = (
            jax.tree.map(partial(reshard, out_shardings=sharding), operand)
            for operand, sharding in zip(operands, shardings, strict=True)
        )
    return attend(*operands)


def _local(options: _Options, q, k, v, plan, documents):
    """What one rank does."""
    exchange = options.keywords("axis_name", "implementation", "deadline")
    softmax = options.keywords("scale", "logit_soft_cap")
    if options.algorithm == "placed":
        return attend_placed(_OP, q, k, v, plan, **exchange, **softmax)
    if options.algorithm == "balanced":
        if plan is None:
            whole = jax.tree.map(
                lambda x: jax.lax.all_gather(x, options.axis_name, axis=1, tiled=True), documents
            )
            plan = plan_attention(
                *whole, world_size=options.num_ranks, **options.keywords("window", "config")
            )
            documents = None, None  # nothing to compare
        return attend_balanced(_OP, q, k, v, plan, *documents, **exchange, **softmax)
    if options.algorithm == "hamilton":
        schedule = hamilton_schedule(options.num_ranks, options.nodes, None, _OP)
    else:
        schedule = ring_schedule(options.num_ranks)
    sequence = Sequence(
        transport=Transport(_OP, **exchange),
        schedule=schedule,
        zigzag=options.causal and options.algorithm != "ring",
        **softmax,
        **options.keywords("causal", "window", "layout"),
    )
    return attend_sequence(sequence, q, k, v, *documents)


def _check_choice(options: _Options, plan) -> None:
    """The algorithm can do what is asked of it."""
    check_implementation(_OP, options.implementation)
    check_deadline(_OP, options.deadline)
    check_layout(_OP, options.layout)
    check_softmax(_OP, options.scale, options.logit_soft_cap)
    reach(_OP, options.causal, options.window)
    name = options.algorithm
    if name not in ALGORITHMS:
        raise ValueError(
            f"{_OP}: algorithm is {name!r}; it needs to be one of "
            f"{', '.join(map(repr, ALGORITHMS))}."
        )
    if name in ("balanced", "placed") and not (options.causal and options.layout == "contiguous"):
        raise ValueError(
            f"{_OP}: algorithm={name!r} plans causal attention of tokens in order; got "
            f"causal={options.causal}, layout={options.layout!r}. Choose another algorithm."
        )
    if name == "placed" and not isinstance(plan, PlacedPlan):
        raise ValueError(
            f"{_OP}: algorithm='placed' needs the plan of a placement, got "
            f"{type(plan).__name__}. Pass plan=place_tokens(...).plan, and q, k, v in placed order."
        )
    if name == "balanced" and isinstance(plan, PlacedPlan):
        raise ValueError(
            f"{_OP}: got the plan of a placement with algorithm='balanced'. Pass "
            "algorithm='placed', and q, k, v in placed order."
        )
    if name not in ("balanced", "placed", "auto") and plan is not None:
        raise ValueError(
            f"{_OP}: got a plan with algorithm={name!r}; only 'balanced' and 'placed' follow a "
            "plan. Pass segment_ids instead."
        )
    if name != "hamilton" and options.nodes is not None:
        raise ValueError(
            f"{_OP}: got nodes={options.nodes} with algorithm={name!r}; they are for 'hamilton'."
        )


def _check_plan(q, axes: MeshAxes, plan, layout, window) -> None:
    """What says where every token stands fits the tokens, the ranks, and what else is given."""
    num_ranks = axes.mesh.shape[axes.axis_name]
    if (plan is not None or layout == "zigzag") and q.shape[1] % num_ranks:
        raise ValueError(
            f"{_OP}: T is {q.shape[1]} but mesh axis {axes.axis_name!r} has {num_ranks} devices, "
            "which must divide it with a plan, and with layout='zigzag'. Pad the tokens (segment 0 "
            "is padding) before the plan, or the layout, is made."
        )
    if plan is not None and window is not None:
        raise ValueError(
            f"{_OP}: got both plan and window; pass one of them. A plan is made for a window."
        )
    if plan is not None and plan.world_size != num_ranks:
        raise ValueError(
            f"{_OP}: the plan is for world_size={plan.world_size} but mesh axis "
            f"{axes.axis_name!r} has {num_ranks} devices. Plan again with that world_size."
        )
    of_all = q.shape[0] * (q.shape[1] // num_ranks)
    if axes.num_groups > 1 and isinstance(plan, AttentionPlan) and plan.num_tokens == of_all:
        raise ValueError(
            f"{_OP}: the plan is for all {q.shape[0]} rows of the batch, but batch_axis "
            f"{axes.batch!r} splits them into {axes.num_groups} groups, and each attends for "
            "itself. Pass segment_ids instead of the plan, or batch_axis=()."
        )
