"""The mesh of a call with global arrays and what its axes shard: given, or inferred."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array

from jax_cp_dispatch._ranks.call_context import find_mesh, is_traced, refuse_other_mesh, retype
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.varying import mapped_axes, refuse_mapped_explicit_axes
from jax_cp_dispatch._text import warn_caller
from jax_cp_dispatch.global_call.kv_heads import kv_copies

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
    search = Search(op, arrays, mesh)
    _warn_of_unset_mesh(search)
    batch, heads = _names(batch_axis), _names(head_axis)
    if batch_axis is None:
        batch = sharding_axes(arrays, 0, mesh, {*sequence, *heads})
        if batch and covers_batch:
            warn_of_plan(search, batch)
            batch = ()
        elif not batch and covers_batch:
            _warn_of_plan_if_traced(search, {*sequence, *heads})
        elif not batch:
            _warn_of_automatic_axes(search, "batch_axis", "B", {*sequence, *heads})
    if head_axis is None:
        heads = sharding_axes(arrays, 2, mesh, {*sequence, *batch})
        if not heads:
            _warn_of_automatic_axes(search, "head_axis", "N", {*sequence, *batch})
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


def sharding_axes(arrays: Sequence[Any], dim: int, mesh, taken: set[str]) -> tuple[str, ...]:
    """Returns the free axes that shard a dimension, from the first array with a known sharding."""
    taken = taken | _hidden_axes(mesh)
    for array in arrays:
        sharding = _find_sharding(array)
        if sharding is not None and dim < len(sharding.spec):
            entry = sharding.spec[dim]
            names = (entry,) if isinstance(entry, str) else entry or ()
            found = tuple(
                name for name in names if name not in taken and _agree(sharding, mesh, name)
            )
            if found:
                return found
    return ()


def _agree(sharding: NamedSharding, mesh, name: str) -> bool:
    size = sharding.mesh.shape[name]
    return size > 1 and mesh.shape.get(name) == size


def _find_sharding(array: Any) -> NamedSharding | None:
    """Returns the known sharding: all axes of a placed array, explicit axes of a traced one."""
    traced = is_traced([array])
    sharding = jax.typeof(array).sharding if traced else getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


class Search(NamedTuple):
    """What a warning is about."""

    op: str
    arrays: tuple[Any, ...]
    mesh: Any

    def warn_once(self, about: str, message: str) -> None:
        with _warn_lock:
            if about in _warned:
                return
            _warned.add(about)
        warn_caller(f"{self.op}: {message}")


def _warn_of_automatic_axes(search: Search, keyword: str, name: str, taken: set[str]) -> None:
    """Warns if a dimension may be sharded over an axis without any way to know."""
    dim = 0 if name == "B" else 2
    axes = _untold_axes(dim, search.arrays, search.mesh, taken)
    if axes:
        search.warn_once(
            keyword,
            f"{keyword} is not given, and a traced program does not show whether {name} = "
            f"{search.arrays[0].shape[dim]} is sharded over the automatic mesh axes {axes}. Over "
            "an axis that is not named, q, k and v are gathered, and each of its devices repeats "
            f"the work of all. Pass as {keyword} the axis over which {name} is sharded, or "
            f"{keyword}=() if there is none.",
        )


def _untold_axes(dim: int, arrays, mesh, taken: set[str]) -> tuple[str, ...]:
    """Returns automatic axes over which a dimension of traced arrays may be sharded."""
    taken = taken | _hidden_axes(mesh)
    size = (*arrays[0].shape, 0)[dim]
    if not size or not is_traced(arrays):
        return ()
    return tuple(
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and axis not in taken and mesh.shape[axis] > 1
        if size % mesh.shape[axis] == 0
    )


def _warn_of_unset_mesh(search: Search) -> None:
    """Warns if no mesh is set and JAX therefore cannot transpose operations on the result."""
    _, arrays, mesh = search
    is_set = not jax.sharding.get_abstract_mesh().empty
    if is_set or AxisType.Explicit not in mesh.axis_types or not is_traced(arrays):
        return
    if all(jax.typeof(x).sharding.mesh.empty for x in arrays):
        search.warn_once(
            "mesh",
            "the mesh has explicit axes but is not set, so gradients of operations on the result, "
            "such as a linear layer, can fail in JAX with a ShardingTypeError. Call under "
            "jax.set_mesh(mesh), or make the mesh with axis_types=(AxisType.Auto,) * "
            f"{len(mesh.axis_names)}.",
        )


def _warn_of_plan_if_traced(search: Search, taken: set[str]) -> None:
    _, arrays, mesh = search
    axes = _untold_axes(0, arrays, mesh, taken)
    if axes:
        search.warn_once(
            "plan",
            "the plan is for all rows of the batch, and a traced program does not show whether "
            f"B = {arrays[0].shape[0]} is sharded over the automatic mesh axes {axes}. If it is, "
            "q, k and v are gathered over these axes, and each of their devices repeats the work "
            "of all. Pass stack_plans of one plan per group and batch_axis, or segment_ids instead "
            "of the plan. Or pass batch_axis=() if the batch is not sharded.",
        )


def warn_of_plan(search: Search, batch: tuple[str, ...]) -> None:
    search.warn_once(
        "plan",
        f"the plan is for all rows of the batch, so q, k and v, whose batch is sharded over "
        f"{batch}, are gathered, and each of its devices repeats the work of all. Pass stack_plans "
        "of one plan per group and batch_axis, or segment_ids instead of the plan. Or pass "
        "batch_axis=() if that is what you want.",
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
