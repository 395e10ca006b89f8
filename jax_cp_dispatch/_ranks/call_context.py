"""The context of a call: on one rank inside `shard_map`, or on the arrays of all ranks."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._jax_private import trace_state_clean
from jax_cp_dispatch._ranks.call_site import mesh_groups
from jax_cp_dispatch._ranks.communicator import Groups


class CallContext(NamedTuple):
    """The mesh of a call, and what must happen before each device runs its part.

    Attributes:
      mesh: None if only the compiler will know it.
      is_global: whether the arrays hold the rows of all ranks; otherwise those of this rank.
      open_axes: axes that our `shard_map` must make manual; if there are none, the partitioner
        handles a global call.
    """

    mesh: Any
    is_global: bool
    open_axes: tuple[str, ...] = ()

    def num_ranks(self, names: Sequence[str]) -> int | None:
        return self.mesh and math.prod(self.mesh.shape[name] for name in names)

    def groups(self, names: Sequence[str]) -> Groups | None:
        """Returns the devices of the ranks, if already known."""
        if self.mesh is None:
            return None
        others = [name for name in self.mesh.axis_names if name not in names]
        return mesh_groups(self.mesh, names, others)


def is_on_rank(op: str, names: tuple[str, ...]) -> bool:
    """Whether the arrays of a call are those of one rank: all axes of the ranks are manual here."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not any(name in manual for name in names):
        return False
    if not all(name in manual for name in names):
        raise ValueError(
            f"{op}: only {tuple(manual)} of axis_name {names} are manual here. Make all of them "
            f"manual, or none: jax.shard_map(..., axis_names={set(names)})."
        )
    return True


def find_context(op: str, names: tuple[str, ...], mesh: Any, arrays: Sequence[Any]) -> CallContext:
    """Finds the context of a call from its surroundings, `mesh`, or the types of the arrays."""
    around = jax.sharding.get_abstract_mesh()
    manual = around.manual_axes
    if is_on_rank(op, names):
        rest = (name for name in around.axis_names if name not in manual)
        return CallContext(around, False, tuple(x for x in rest if around.shape[x] > 1))
    found = around if manual else find_mesh(names, mesh, around, arrays)
    if found is None:
        _refuse_vmap_axes(op, names)
        if not is_in_program(arrays):
            raise ValueError(
                f"{op}: no mesh with axis {names[0]!r} was found. Call {op} inside jax.shard_map "
                f"over {names[0]!r}, or on arrays of all ranks with mesh=, under jax.set_mesh, or "
                "sharded over such a mesh."
            )
        return CallContext(None, True)
    missing = [name for name in names if name not in found.axis_names]
    if missing:
        raise ValueError(
            f"{op}: axis_name {missing[0]!r} is not an axis of the mesh here, which has "
            f"{tuple(found.axis_names)}. Name the axis whose devices are the ranks."
        )
    if not manual and all(kind == AxisType.Auto for kind in found.axis_types):
        return CallContext(found, True)
    return CallContext(found, True, tuple(name for name in found.axis_names if name not in manual))


def _refuse_vmap_axes(op: str, names: tuple[str, ...]) -> None:
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            continue
        raise ValueError(
            f"{op}: axis_name {name!r} is an axis of jax.vmap here, but the ranks must be devices. "
            "Use another name in jax.vmap, and pass the name of a mesh axis."
        )


def find_mesh(names: Sequence[str], mesh: Any, around: Any, arrays: Sequence[Any]) -> Any:
    """Returns the user's mesh, or that of an array; if possible, one that has `names`."""
    if mesh is not None:
        return mesh
    if any(name in around.axis_names for name in names):
        return around if is_in_program(arrays) else jax.sharding.get_mesh()
    for array in arrays:
        is_placed = isinstance(array, jax.Array) and not is_traced([array])
        typed = getattr((array if is_placed else jax.typeof(array)).sharding, "mesh", None)
        if typed is not None and any(name in typed.axis_names for name in names):
            return typed
    return None if around.empty else around


def refuse_other_mesh(op: str, mesh: Any, arrays: Iterable[Any]) -> None:
    """Refuses arrays that are placed on the same devices by another mesh than the call's.

    JAX gives a program with our primitives one mesh, and otherwise raises without the name of the
    operation. Call outside `shard_map`.
    """
    placed = [x for x in arrays if isinstance(x, jax.Array)]
    if is_in_program(placed):  # others are constants of the program
        placed = [x for x in placed if isinstance(x, Tracer)]
    for x in placed:
        own = jax.typeof(x).sharding.mesh
        is_other = (own.shape_tuple, own.axis_types) != (mesh.shape_tuple, mesh.axis_types)
        if is_other and own.size == mesh.size > 1:
            raise ValueError(
                f"{op}: an array of shape {list(x.shape)} is placed on a mesh with the axes "
                f"{_described(own)}, but the call has one with {_described(mesh)}. Pass the mesh "
                "of the arrays, or place them on this one before the program: "
                "jax.device_put(x, NamedSharding(mesh, spec))."
            )


def _described(mesh: Any) -> str:
    axes = zip(mesh.shape_tuple, mesh.axis_types, strict=True)
    return ", ".join(f"{name}={size} ({kind.name})" for (name, size), kind in axes)


def is_traced(arrays: Iterable[Any]) -> bool:
    """Whether some of the arrays are known only when the program runs."""
    return any(isinstance(x, Tracer) for x in arrays)


def is_in_program(arrays: Iterable[Any]) -> bool:
    """Whether a call is part of a program that is traced, of whose arrays all may be constants."""
    return is_traced(arrays) or not trace_state_clean()


def retype(x: Any, mesh: Any, spec: P) -> Any:
    """Shards an array over the explicit axes of `spec`; types do not show the others."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    typed = lambda entry: tuple(a for a in axes_of(entry) if kinds[a] == AxisType.Explicit) or None
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*map(typed, spec))))


def place(x: Any, mesh: Any, spec: P) -> Any:
    """Places an array that is known here; `retype` of others, and in a program without devices."""
    if is_traced([x]) or isinstance(mesh, AbstractMesh):
        return retype(x, mesh, spec)
    return jax.device_put(x, NamedSharding(mesh, spec))


def with_manual_axes(
    fn: Callable[..., Any],
    axes: Sequence[str],
    mesh: Any,
    *,
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., Any]:
    """Returns `fn` with `axes` manual too, in the surrounding mesh or else in `mesh`."""
    around = jax.sharding.get_abstract_mesh()
    is_around = all(name in around.axis_names for name in axes)
    return jax.shard_map(
        fn,
        mesh=None if is_around else mesh,
        axis_names=set(axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
