"""A call on one rank or on global arrays: its axes, its documents, one program on all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

from jax_cp_dispatch._arguments import is_on_host
from jax_cp_dispatch._ranks.communicator import axes_of
from jax_cp_dispatch._ranks.options import (
    CollectiveOptions,
    can_check_varying,
    find_mesh,
    is_on_rank,
    is_traced,
    mapped_axes,
    refuse_mapped_explicit_axes,
    refuse_other_mesh,
    retype,
    varying_axes,
)
from jax_cp_dispatch._text import warn_caller
from jax_cp_dispatch.documents.documents import (
    Documents,
    check_call_ranks,
    read_whole,
    replaced,
    with_segment_ids,
)
from jax_cp_dispatch.documents.segment_ids import normalize_segment_ids
from jax_cp_dispatch.planning.plan import Plan, check_groups, is_stack

# ---- The KV heads of each of the devices that share the heads.


def kv_copies(num_heads: int, num_kv_heads: int, num_devices: int) -> int:
    """Returns how often to repeat each KV head, so that the devices of the heads divide them.

    The least common multiple of K and the devices divides N if both do, and query head n reads the
    same head as before, n // (N / K).
    """
    if num_heads % num_kv_heads:
        return 1  # local attention raises the error
    return math.lcm(num_kv_heads, num_devices) // num_kv_heads


class OwnHeads(NamedTuple):
    """The KV heads that a device keeps of those that several devices compute alike; static."""

    axes: tuple[str, ...]  # mesh axes that share these heads, major axis first
    copies: int  # how often each head is repeated first; see `kv_copies`
    num_heads: int  # that each device keeps

    def of(self, x: Float[Array, "R K H"]) -> Float[Array, "R own H"]:
        first = self.num_heads * lax.axis_index(self.axes)
        repeated = jnp.repeat(x, self.copies, axis=1)
        return lax.dynamic_slice_in_dim(repeated, first, self.num_heads, axis=1)


# ---- The mesh of a call and what its axes shard: given, or inferred.

Names = str | Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh and the axes that a call uses, the major axis first."""

    mesh: Mesh | AbstractMesh
    ranks: tuple[str, ...]  # the axes that share the sequence
    # The axes that shard B, and N and K
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    # The axes that a `shard_map` makes manual: all that are not; on one rank the explicit ones, or
    # none if they shard nothing, and the call runs as it is
    manual: frozenset[str]

    @property
    def sequence(self) -> tuple[str, ...]:
        """The axes that shard the arrays by their tokens; () on one rank."""
        return tuple(name for name in self.ranks if name in self.manual)

    @property
    def rows(self) -> P:
        """How arrays [B, T, ...] are sharded by their tokens."""
        return P(self.batch, self.sequence)

    def num_devices(self, names: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[name] for name in names)

    def repeat_kv_heads(self, x: Array | np.ndarray, num_heads: int) -> Array | np.ndarray:
        """Repeats each head of K or V `kv_copies` times; gradients of the copies are summed."""
        copies = kv_copies(num_heads, x.shape[2], self.num_devices(self.heads))
        if copies == 1:
            return x
        if AxisType.Explicit in self.mesh.axis_types:  # cannot repeat a sharded dimension
            x = retype(x, self.mesh, self.rows)
        return jnp.repeat(x, copies, axis=2)


def find_axes(
    options: CollectiveOptions,
    *arrays: Any,
    batch_axis: Names = None,
    head_axis: Names = None,
    others: Any = (),
    plan: Plan | None = None,
) -> MeshAxes:
    """Finds the axes of a call; on global arrays also its mesh, and the axes that are None.

    Arrays are [B, T, ...]; axis 2 of the first is that of the heads. If `plan` is one plan for all
    rows of the batch, the axes of B are not inferred.
    """
    op, ranks = options.op, options.axis_names
    covers_batch = plan is not None and not is_stack(plan)
    if is_on_rank(op, ranks):
        axes = explicit_axes(op, *arrays, others=others, covers_batch=covers_batch)
        if axes is None:
            return MeshAxes(jax.sharding.get_abstract_mesh(), ranks, (), (), frozenset())
        return dataclasses.replace(axes, ranks=ranks)
    mesh = _find_mesh(options, arrays)
    given = {"axis_name": options.axis_name, "batch_axis": batch_axis, "head_axis": head_axis}
    for keyword, named in given.items():
        if not set(axes_of(named)) <= set(mesh.axis_names):
            raise ValueError(
                f"{op}: {keyword} is {named!r} but the mesh has axes {tuple(mesh.axis_names)}. "
                "Name some of these, or pass the mesh that has it."
            )
    used = [name for named in given.values() for name in axes_of(named)]
    if len(set(used)) < len(used):
        raise ValueError(
            f"{op}: {', '.join(f'{keyword} is {named!r}' for keyword, named in given.items())}; a "
            "mesh axis can shard one dimension only. Name each once."
        )
    refuse_mapped_explicit_axes(op, mesh)
    batch, heads = axes_of(batch_axis), axes_of(head_axis)
    if batch_axis is None:
        batch = _infer(op, 0, arrays, mesh, (*ranks, *heads), covers_batch)
    if head_axis is None:
        heads = _infer(op, 2, arrays, mesh, (*ranks, *batch), False)
    manual = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    axes = MeshAxes(mesh, ranks, batch, heads, manual)
    B, _, N, *_ = *arrays[0].shape, 1, 1
    if B % axes.num_devices(batch):
        raise ValueError(
            f"{op}: B is {B} but batch_axis {batch!r} has {axes.num_devices(batch)} devices, which "
            "must divide it. Pass batch_axis=(), and each of them computes the whole batch; or pad "
            "the batch with rows of segment id 0."
        )
    if N % axes.num_devices(heads):
        raise ValueError(
            f"{op}: N is {N} but head_axis {heads!r} has {axes.num_devices(heads)} devices, "
            "which must divide it. Pass head_axis=(), and each of them computes all heads; or name "
            "an axis of fewer devices."
        )
    return axes


def _find_mesh(options: CollectiveOptions, arrays: Any) -> Mesh | AbstractMesh:
    """Finds the mesh of global arrays; warns if it has explicit axes but is not set.

    JAX then cannot transpose operations on the result.
    """
    op, around = options.op, jax.sharding.get_abstract_mesh()
    if around.manual_axes:  # JAX needs the same mesh in a nested shard_map
        return around
    found = find_mesh(options.axis_names, options.mesh, around, arrays)
    if found is None:
        raise ValueError(
            f"{op}: no mesh with axis {options.axis_names[0]!r} was found. Pass mesh=, call it "
            "under jax.set_mesh, or place the arrays on such a mesh."
        )
    refuse_other_mesh(op, found, arrays)
    is_unset = around.empty and all(jax.typeof(x).sharding.mesh.empty for x in arrays)
    if is_unset and AxisType.Explicit in found.axis_types and is_traced(arrays):
        _warn_once(
            op,
            "mesh",
            "the mesh has explicit axes but is not set, so gradients of operations on the result, "
            "such as a linear layer, can fail in JAX with a ShardingTypeError. Call under "
            "jax.set_mesh(mesh), or make the mesh with axis_types=(AxisType.Auto,) * "
            f"{len(found.axis_names)}.",
        )
    return found


def _infer(
    op: str, dim: int, arrays: Any, mesh: Any, taken: Sequence[str], covers_batch: bool
) -> tuple[str, ...]:
    """Returns the axes of dimension B or N; warns, once in a process, if they cannot be seen.

    `taken` are axes that shard something else. A plan that covers the batch leaves none for B.
    """
    keyword, name = ("batch_axis", "B") if dim == 0 else ("head_axis", "N")
    seen, possible = _axes_of(dim, arrays, mesh, taken)
    if covers_batch:
        _warn_of_plan(op, seen, possible, arrays[0].shape[0])
        return ()
    if possible:
        _warn_once(
            op,
            keyword,
            f"{keyword} is not given, and a traced program does not show whether {name} = "
            f"{arrays[0].shape[dim]} is sharded over the automatic mesh axes {possible}. Over an "
            "axis that is not named, q, k and v are gathered, and each of its devices repeats the "
            f"work of all. Pass as {keyword} the axis over which {name} is sharded, or "
            f"{keyword}=() if there is none.",
        )
    return seen


def _axes_of(
    dim: int, arrays: Any, mesh: Any, taken: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes that shard a dimension, by the first array with a known sharding.

    The second result is the automatic axes over which traced arrays may be sharded, if there are
    none of the former.
    """
    # Axes of an outer `shard_map` or `vmap` shard nothing visible here.
    hidden = {*taken, *mesh.manual_axes, *mapped_axes()}
    for array in arrays:
        # A placed array shows all axes, and a traced one the explicit axes.
        typed = jax.typeof(array) if is_traced([array]) else array
        sharding = getattr(typed, "sharding", None)
        if isinstance(sharding, NamedSharding) and dim < len(sharding.spec):
            sizes = sharding.mesh.shape
            is_here = lambda name, sizes=sizes: 1 < sizes[name] == mesh.shape.get(name)
            names = axes_of(sharding.spec[dim])
            if seen := tuple(x for x in names if x not in hidden and is_here(x)):
                return seen, ()
    if not is_traced(arrays) or not (size := (*arrays[0].shape, 0)[dim]):
        return (), ()
    automatic = zip(mesh.axis_names, mesh.axis_types, strict=True)
    automatic = [x for x, kind in automatic if kind == AxisType.Auto and x not in hidden]
    return (), tuple(x for x in automatic if mesh.shape[x] > 1 and size % mesh.shape[x] == 0)


def _warn_of_plan(op: str, seen: tuple[str, ...], possible: tuple[str, ...], batch: int) -> None:
    """Warns of a plan for all rows of a batch that mesh axes shard, or may shard."""
    unless = "that is what you want" if seen else "the batch is not sharded"
    why = (
        f"so q, k and v, whose batch is sharded over {seen}, are gathered, and each of its "
        "devices repeats the work of all"
    )
    if not seen:
        why = (
            f"and a traced program does not show whether B = {batch} is sharded over the automatic "
            f"mesh axes {possible}. If it is, q, k and v are gathered over these axes, and each of "
            "their devices repeats the work of all"
        )
    if seen or possible:
        _warn_once(
            op,
            "plan",
            f"the plan is for all rows of the batch, {why}. Pass stack_plans of one plan per group "
            "and batch_axis, or segment_ids instead of the plan. Or pass batch_axis=() if "
            f"{unless}.",
        )


_warned: set[str] = set()
_warn_lock = threading.Lock()


def _warn_once(op: str, about: str, message: str) -> None:
    with _warn_lock:
        if about in _warned:
            return
        _warned.add(about)
    warn_caller(f"{op}: {message}")


def explicit_names(mesh: Any) -> tuple[str, ...]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


# ---- The documents of a call, and one program on all ranks.


def fit_documents(
    op: str, documents: Documents, axes: MeshAxes, shape: tuple[int, int]
) -> tuple[Documents, int, bool]:
    """Requires documents of the call's tokens and ranks; reads and pads those of global arrays.

    `shape` is B and T of the arrays. Returns the documents of tokens that the ranks divide; how
    many tokens are appended to each row; and whether the ranks need to check the order of the
    tokens, which is not known on the host.
    """
    num_ranks, plan, (name, *more) = axes.num_devices(axes.ranks), documents.plan, axes.ranks
    ranks = f"mesh axis {name!r} has {num_ranks} devices"
    if more:
        ranks = f"mesh axes {', '.join(map(repr, axes.ranks))} have {num_ranks} devices"
    num_tokens, is_global = shape[1], bool(axes.sequence)
    check_call_ranks(op, documents, num_tokens * (1 if is_global else num_ranks), num_ranks, ranks)
    if not is_global:
        if plan is None:
            ids, positions = normalize_segment_ids(op, documents.segment_ids, documents.positions)
            documents = replaced(documents, segment_ids=ids, positions=positions)
        return documents, 0, True
    missing = -num_tokens % num_ranks
    if missing and (plan is not None or documents.order.layout == "zigzag"):
        step = "Pad the tokens (segment 0 is padding) before you plan or reorder them."
        if plan is not None and plan.is_placed:
            step = "Pass the tokens of the placement."
        raise ValueError(
            f"{op}: T is {num_tokens} but {ranks}, which must divide it with a plan, and in zigzag "
            f"order. {step}"
        )
    if plan is not None:
        if plan.world_size != num_ranks:
            again = "Place the tokens again" if plan.is_placed else "Plan again"
            raise ValueError(
                f"{op}: the plan is for world_size={plan.world_size} but {ranks}. {again} with "
                "that world_size."
            )
        check_groups(op, plan, num_groups=axes.num_devices(axes.batch), batch=axes.batch)
    else:
        documents = read_whole(op, documents, num_ranks)
    known = all(map(is_on_host, jax.tree.leaves(replaced(documents, plans=()))))
    if missing:
        documents = pad_tokens(with_segment_ids(documents, shape), missing)
    return documents, missing, not known


def on_all_ranks(
    run: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    axes: MeshAxes,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    num_differentiable: int,
) -> Any:
    """Returns `run(*operands)` of every rank, in a `shard_map` over all axes not yet manual.

    A spec is for one array, or for all of a pytree. The first `num_differentiable` operands have
    derivatives.
    """
    shard_map = partial(jax.shard_map, check_vma=can_check_varying())
    # An operand may vary over an axis that a surrounding `shard_map` has made manual.
    if any(varying_axes(x) - axes.manual for x in jax.tree.leaves(operands)):
        shard_map = partial(shard_map_inside, num_differentiable=num_differentiable)
    mapped = shard_map(
        run, mesh=axes.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes.manual
    )
    if AxisType.Explicit in axes.mesh.axis_types:  # over explicit axes shard_map does not reshard
        put_all = lambda spec, part: jax.tree.map(lambda x: retype(x, axes.mesh, spec), part)
        operands = jax.tree.map(put_all, in_specs, operands, is_leaf=lambda x: isinstance(x, P))
    return mapped(*operands)


def pad_tokens(tree: Any, missing: int) -> Any:
    """Appends zeros to arrays [B, T, ...]: tokens of segment 0."""

    def pad(x):
        append = np.pad if isinstance(x, np.ndarray) else jnp.pad  # known values stay known in jit
        return append(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, tree) if missing else tree


def cut_tokens(tree: Any, num_tokens: int, mesh: Any) -> Any:
    """Removes what `pad_tokens` has appended.

    Explicit mesh axes shard equal parts only, so none of them shards the remaining tokens.
    """

    def cut(x):
        if AxisType.Explicit in mesh.axis_types:
            batch, _, *others = jax.typeof(x).sharding.spec
            x = retype(x, mesh, P(batch, None, *others))
        return x[:, :num_tokens]

    return jax.tree.map(cut, tree)


def shard_map_inside(
    attend: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    axis_names: Set[str],
    num_differentiable: int,
) -> Callable[..., Any]:
    """Returns `jax.shard_map(attend, ...)`, for use inside another.

    Differentiable in the first `num_differentiable` operands, in reverse mode.

    JAX 0.10.2 splits a `shard_map` into two, one for values needed first and one for the rest, in a
    derivative, in a loop with constant operands, and for a checkpoint policy. What the first hands
    to the second it shards over every axis over which it varies, also over those that the
    surrounding `shard_map` has made manual (`nospec` in `core.py`), which XLA rejects. So here the
    forward pass returns its residuals as outputs that are sharded over the inner axes only, and no
    pass is split: JAX does not look into a `custom_vmap`.
    """
    shard_map = partial(_whole_shard_map, mesh=mesh, axis_names=axis_names)
    inner = [name for name in mesh.axis_names if name in axis_names]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(inner, size) for size in range(len(inner) + 1)
    )
    residual_specs = {axes: P(axes) for axes in subsets}

    def with_residuals(pulls, *operands):
        """Returns the output, and residuals by the axes over which they vary; adds their use."""
        wrt, others = operands[:num_differentiable], operands[num_differentiable:]
        out, pull_back = jax.vjp(lambda *wrt: attend(*wrt, *others), *wrt)
        leaves, treedef = jax.tree.flatten(pull_back)
        axes = [tuple(name for name in inner if name in varying_axes(x)) for x in leaves]
        residuals = {
            subset: [x[None] for x, own in zip(leaves, axes, strict=True) if own == subset]
            for subset in residual_specs
        }
        pulls.append(partial(_pull, treedef, axes))
        return out, residuals

    @jax.custom_vjp
    def call(*operands):
        return shard_map(attend, in_specs=in_specs, out_specs=out_specs)(*operands)

    def forward(*operands):
        pulls, specs = [], (out_specs, residual_specs)
        fn = partial(with_residuals, pulls)
        out, residuals = shard_map(fn, in_specs=in_specs, out_specs=specs)(*operands)
        # `jax.vmap` calls `fn` again, for the same residuals.
        return out, (residuals, jax.tree_util.Partial(pulls[0]), len(operands))

    def backward(kept, dout):
        residuals, pull, num_operands = kept
        specs = (residual_specs, out_specs)
        gradients = shard_map(pull, in_specs=specs, out_specs=in_specs[:num_differentiable])(
            residuals, dout
        )
        return *gradients, *(None,) * (num_operands - num_differentiable)

    call.defvjp(forward, backward)
    return call


def _whole_shard_map(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a `jax.shard_map` that JAX does not split."""
    mapped = jax.shard_map(fn, **options)
    whole = custom_vmap(mapped)

    @whole.def_vmap
    def _(axis_size, is_batched, *operands):
        in_axes = jax.tree.map(lambda x: 0 if x else None, is_batched)
        out = jax.vmap(mapped, in_axes=tuple(in_axes), axis_size=axis_size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return whole


def _pull(treedef: Any, axes: list[tuple[str, ...]], residuals: dict[Any, list[Any]], dout: Any):
    """Returns the gradients of one rank from its residuals."""
    left = {subset: iter(arrays) for subset, arrays in residuals.items()}
    leaves = [next(left[own])[0] for own in axes]
    return jax.tree.unflatten(treedef, leaves)(dout)


# ---- The explicit mesh axes of a call inside `jax.shard_map`, on one rank: they become manual too.
#
# Few operations of JAX accept arrays that an explicit axis shards.


def explicit_axes(op: str, *arrays: Any, others: Any, covers_batch: bool) -> MeshAxes | None:
    """Returns the explicit axes that shard the arrays of one rank; None if there are none.

    Axes of batch and heads are those of the types; over others, arrays are gathered.
    `covers_batch`: whether one plan is for all rows of the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _are_sharded((arrays, others)):
        return None
    batch, _ = _axes_of(0, arrays, mesh, ())
    if batch and covers_batch:
        _warn_of_plan(op, batch, (), 0)
        batch = ()
    heads, _ = _axes_of(2, arrays, mesh, batch)
    return MeshAxes(mesh, (), batch, heads, frozenset(explicit_names(mesh)))


def refuse_explicit_axes(op: str, arrays: Any) -> None:
    """Refuses `Pieces` of one rank, or documents for them, which explicit axes shard further."""
    if _are_sharded(arrays):
        mesh = jax.sharding.get_abstract_mesh()
        raise ValueError(
            f"{op}: pieces are those of a whole rank, but an explicit mesh axis, one of "
            f"{explicit_names(mesh)}, shards its arrays. Pass documents to each layer in place of "
            "pieces, or make the axis manual too, in axis_names of jax.shard_map."
        )


def _are_sharded(arrays: Any) -> bool:
    """Whether the types of some arrays show explicit axes."""
    specs = (jax.typeof(x).sharding.spec for x in jax.tree.leaves(arrays))
    return any(entry is not None for spec in specs for entry in spec)
