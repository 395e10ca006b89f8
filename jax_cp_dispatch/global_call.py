"""Runs the function of one rank on all ranks, from global arrays; also in a `shard_map`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import (
    can_check_varying,
    find_mesh,
    is_traced,
    mapped_axes,
    refuse_mapped_explicit_axes,
    refuse_other_mesh,
    retype,
    varying_axes,
)
from jax_cp_dispatch._text import warn_caller

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
    """The KV heads that a device keeps of those that several devices have computed alike; static.

    Attributes:
      axes: mesh axes that share these heads, major axis first.
      copies: how often each head is repeated first; see `kv_copies`.
      num_heads: that each device keeps.
    """

    axes: tuple[str, ...]
    copies: int
    num_heads: int

    def of(self, x: Float[Array, "R K H"]) -> Float[Array, "R own H"]:
        """Returns the device's own heads."""
        first = self.num_heads * lax.axis_index(self.axes)
        repeated = jnp.repeat(x, self.copies, axis=1)
        return lax.dynamic_slice_in_dim(repeated, first, self.num_heads, axis=1)


# ---- The mesh of a call with global arrays and what its axes shard: given, or inferred.

Names = str | Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh and the axes that a call uses.

    Attributes:
      sequence: axes that shard the sequence, major axis first; () on one rank, where they are
        manual.
      batch, heads: axes that shard B, and N and K; major axis first.
    """

    mesh: Mesh | AbstractMesh
    sequence: tuple[str, ...]
    batch: tuple[str, ...]
    heads: tuple[str, ...]

    @property
    def manual(self) -> set[str]:
        """The axes that a `shard_map` makes manual: all that are not, on one rank the explicit."""
        if not self.sequence:
            return set(explicit_names(self.mesh))
        return set(self.mesh.axis_names) - set(_manual_axes(self.mesh))

    def num_devices(self, names: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def axis_name(self) -> AxisName:
        """The axes of the sequence, as an axis name."""
        first, *others = self.sequence
        return self.sequence if others else first

    @property
    def rows(self) -> P:
        """How arrays [B, T, ...] are sharded by their tokens."""
        return P(self.batch, self.sequence)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The devices of each axis of the sequence."""
        return tuple(self.mesh.shape[name] for name in self.sequence)

    @property
    def num_ranks(self) -> int:
        return self.num_devices(self.sequence)

    @property
    def described(self) -> str:
        """The axes of the sequence and their devices, for messages."""
        name, *others = map(repr, self.sequence)
        if not others:
            return f"mesh axis {name} has {self.num_ranks} devices"
        return f"mesh axes {', '.join([name, *others])} have {self.num_ranks} devices"

    @property
    def num_groups(self) -> int:
        """The number of equal parts of the batch."""
        return self.num_devices(self.batch)

    def kv_copies(self, num_heads: int, num_kv_heads: int) -> int:
        """Returns `kv_copies` for the devices of the heads."""
        return kv_copies(num_heads, num_kv_heads, self.num_devices(self.heads))

    def repeat_kv_heads(self, x: Array | np.ndarray, num_heads: int) -> Array | np.ndarray:
        """Repeats each head of K or V `kv_copies` times; gradients of the copies are summed."""
        copies = self.kv_copies(num_heads, x.shape[2])
        if copies == 1:
            return x
        if AxisType.Explicit in self.mesh.axis_types:  # cannot repeat a sharded dimension
            x = retype(x, self.mesh, self.rows)
        return jnp.repeat(x, copies, axis=2)


class GivenAxes(NamedTuple):
    """The mesh and the axes as the caller names them; None: to be found."""

    mesh: Any
    axis_name: AxisName
    batch_axis: Names
    head_axis: Names


def find_axes(op: str, *arrays: Any, given: GivenAxes, covers_batch: bool) -> MeshAxes:
    """Finds the mesh (surroundings, `mesh`, or the arrays), and infers the axes that are None.

    Arrays are [B, T, ...]; axis 2 of the first is that of the heads. With a plan that covers the
    whole batch, no axes of the batch are inferred.
    """
    mesh, axis_name, batch_axis, head_axis = given
    sequence = _names(axis_name)
    mesh = _find_mesh(op, mesh, sequence, arrays)
    if not _manual_axes(mesh):
        refuse_other_mesh(op, mesh, arrays)
    names = {"axis_name": axis_name, "batch_axis": batch_axis, "head_axis": head_axis}
    _check_names(op, mesh, names)
    refuse_mapped_explicit_axes(op, mesh)
    batch, heads = _names(batch_axis), _names(head_axis)
    search = _Search(op, arrays, mesh, frozenset((*sequence, *heads)))
    search.warn_of_unset_mesh()
    if batch_axis is None and covers_batch:
        search.warn_of_plan()
    elif batch_axis is None:
        batch = search.found(0)
        if not batch:
            search.warn_of_unnamed("batch_axis", "B", 0)
    if head_axis is None:
        search = search._replace(taken=frozenset((*sequence, *batch)))
        heads = search.found(2)
        if not heads:
            search.warn_of_unnamed("head_axis", "N", 2)
    axes = MeshAxes(mesh, sequence, batch, heads)
    first = arrays[0]
    _check_divides(op, "B", first.shape[0], "batch_axis", axes)
    if heads:
        _check_divides(op, "N", (*first.shape, 1)[2], "head_axis", axes)
    return axes


def _find_mesh(op, mesh, sequence, arrays) -> Mesh | AbstractMesh:
    around = jax.sharding.get_abstract_mesh()
    if around.manual_axes:  # JAX needs the same mesh in a nested shard_map
        return around
    found = find_mesh(sequence, mesh, around, arrays)
    if found is None:
        raise ValueError(
            f"{op}: no mesh with axis {sequence[0]!r} was found. Pass mesh=, call it under "
            "jax.set_mesh, or place the arrays on such a mesh."
        )
    return found


def _check_names(op: str, mesh, given: dict[str, Names]) -> None:
    for keyword, named in given.items():
        if not set(_names(named)) <= set(mesh.axis_names):
            raise ValueError(
                f"{op}: {keyword} is {named!r} but the mesh has axes {tuple(mesh.axis_names)}. "
                "Name some of these, or pass the mesh that has it."
            )
    used = [name for named in given.values() for name in _names(named)]
    if len(set(used)) < len(used):
        raise ValueError(
            f"{op}: {', '.join(f'{keyword} is {named!r}' for keyword, named in given.items())}; a "
            "mesh axis can shard one dimension only. Name each once."
        )


def _check_divides(op: str, dim: str, size: int, keyword: str, axes: MeshAxes):
    names = axes.batch if dim == "B" else axes.heads
    devices = axes.num_devices(names)
    if size % devices:
        if dim == "B":
            step = "pad the batch with rows of segment id 0"
            whole = "the whole batch"
        else:
            step, whole = "name an axis of fewer devices", "all heads"
        raise ValueError(
            f"{op}: {dim} is {size} but {keyword} {names!r} has {devices} devices, which must "
            f"divide it. Pass {keyword}=(), and each of them computes {whole}; or {step}."
        )


# ---- Inference of axes that are not named.


class _Search(NamedTuple):
    """Looks for axes that shard arrays; warns, once in a process, where they cannot be seen.

    Attributes:
      taken: axes that shard something else.
    """

    op: str
    arrays: tuple[Any, ...]
    mesh: Any
    taken: frozenset[str]

    def found(self, dim: int) -> tuple[str, ...]:
        """Returns the axes of a dimension, from the first array with a known sharding."""
        hidden = self.taken | _hidden_axes(self.mesh)
        for array in self.arrays:
            # All axes of a placed array, explicit axes of a traced one.
            typed = jax.typeof(array) if is_traced([array]) else array
            sharding = getattr(typed, "sharding", None)
            if isinstance(sharding, NamedSharding) and dim < len(sharding.spec):
                entry, sizes = sharding.spec[dim], sharding.mesh.shape
                names = (entry,) if isinstance(entry, str) else entry or ()
                is_here = lambda name, sizes=sizes: 1 < sizes[name] == self.mesh.shape.get(name)
                if found := tuple(x for x in names if x not in hidden and is_here(x)):
                    return found
        return ()

    def untold(self, dim: int) -> tuple[str, ...]:
        """Returns automatic axes over which a dimension of traced arrays may be sharded."""
        mesh, size = self.mesh, (*self.arrays[0].shape, 0)[dim]
        if not size or not is_traced(self.arrays):
            return ()
        hidden = self.taken | _hidden_axes(mesh)
        return tuple(
            axis
            for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto and axis not in hidden and mesh.shape[axis] > 1
            if size % mesh.shape[axis] == 0
        )

    def warn_once(self, about: str, message: str) -> None:
        with _warn_lock:
            if about in _warned:
                return
            _warned.add(about)
        warn_caller(f"{self.op}: {message}")

    def warn_of_unset_mesh(self) -> None:
        """Warns if no mesh is set and JAX therefore cannot transpose operations on the result."""
        is_set = not jax.sharding.get_abstract_mesh().empty
        if is_set or AxisType.Explicit not in self.mesh.axis_types or not is_traced(self.arrays):
            return
        if all(jax.typeof(x).sharding.mesh.empty for x in self.arrays):
            self.warn_once(
                "mesh",
                "the mesh has explicit axes but is not set, so gradients of operations on the "
                "result, such as a linear layer, can fail in JAX with a ShardingTypeError. Call "
                "under jax.set_mesh(mesh), or make the mesh with axis_types=(AxisType.Auto,) * "
                f"{len(self.mesh.axis_names)}.",
            )

    def warn_of_unnamed(self, keyword: str, name: str, dim: int) -> None:
        """Warns if a dimension may be sharded over an axis without any way to know."""
        if axes := self.untold(dim):
            self.warn_once(
                keyword,
                f"{keyword} is not given, and a traced program does not show whether {name} = "
                f"{self.arrays[0].shape[dim]} is sharded over the automatic mesh axes {axes}. Over "
                "an axis that is not named, q, k and v are gathered, and each of its devices "
                f"repeats the work of all. Pass as {keyword} the axis over which {name} is "
                f"sharded, or {keyword}=() if there is none.",
            )

    def warn_of_plan(self) -> None:
        """Warns of a plan for all rows of a batch that mesh axes shard, or may shard."""
        if axes := self.found(0):
            why, unless = (
                (
                    f"so q, k and v, whose batch is sharded over {axes}, are gathered, and each of its "
                    "devices repeats the work of all"
                ),
                "that is what you want",
            )
        elif axes := self.untold(0):
            why, unless = (
                (
                    f"and a traced program does not show whether B = {self.arrays[0].shape[0]} is "
                    f"sharded over the automatic mesh axes {axes}. If it is, q, k and v are gathered "
                    "over these axes, and each of their devices repeats the work of all"
                ),
                "the batch is not sharded",
            )
        else:
            return
        self.warn_once(
            "plan",
            f"the plan is for all rows of the batch, {why}. Pass stack_plans of one plan per group "
            "and batch_axis, or segment_ids instead of the plan. Or pass batch_axis=() if "
            f"{unless}.",
        )


_warned: set[str] = set()
_warn_lock = threading.Lock()


def _hidden_axes(mesh) -> set[str]:
    """Returns axes that an outer `shard_map` or `vmap` uses, which shard nothing visible here."""
    return {*_manual_axes(mesh), *mapped_axes()}


def explicit_names(mesh) -> tuple[str, ...]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def _manual_axes(mesh) -> tuple[str, ...]:
    return tuple(getattr(mesh, "manual_axes", ()))


def _names(axis: Names) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


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

    Args:
      run: the part of one rank.
      operands: pytrees of global arrays.
      axes: of the mesh.
      in_specs: for each operand; a spec is for one array, or for all of a pytree.
      out_specs: of the result.
      num_differentiable: how many operands, the first ones, have derivatives.
    """
    shard_map = partial(jax.shard_map, check_vma=can_check_varying())
    if varies_outside(operands, axes.manual):
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


def varies_outside(operands: Any, manual: set[str]) -> bool:
    """Whether an operand varies over an axis that a surrounding `shard_map` has made manual."""
    return any(varying_axes(x) - manual for x in jax.tree.leaves(operands))


def shard_map_inside(
    attend: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    axis_names: set[str],
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

    Args:
      op, arrays, covers_batch: see `find_axes`.
      others: a pytree of the other arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _are_sharded((arrays, others)):
        return None
    search = _Search(op, arrays, mesh, frozenset())
    batch = search.found(0)
    if batch and covers_batch:
        search.warn_of_plan()
        batch = ()
    heads = search._replace(taken=frozenset(batch)).found(2)
    return MeshAxes(mesh, (), batch, heads)


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
