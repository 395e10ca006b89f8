"""Where a call stands: on one rank inside `shard_map`, or around the arrays of all ranks."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._ranks.call_site import Groups, groups_of_mesh
from jax_cp_dispatch._ranks.varying import vary_alike, varying_axes


class Place(NamedTuple):
    """The mesh around a call, and what is to be done before every device runs its part.

    Attributes:
      mesh: None where only the compiler will know it.
      is_global: the arrays hold the rows of all ranks; else those of this rank.
      open_axes: axes that a `shard_map` of ours has to make manual; without any, a global call is
        left to the partitioner.
    """

    mesh: Any
    is_global: bool
    open_axes: tuple[str, ...] = ()

    def num_ranks(self, names: Sequence[str]) -> int | None:
        return self.mesh and math.prod(self.mesh.shape[name] for name in names)

    def groups(self, names: Sequence[str]) -> Groups | None:
        """In which processes the ranks are, as far as it is known already."""
        if self.mesh is None:
            return None
        others = [name for name in self.mesh.axis_names if name not in names]
        return groups_of_mesh(self.mesh, names, others)


def find_place(op: str, names: tuple[str, ...], mesh: Any, arrays: Sequence[Any]) -> Place:
    """Reads where the call stands from the surroundings, `mesh`, or the types of the arrays."""
    around = jax.sharding.get_abstract_mesh()
    manual = around.manual_axes
    if manual and all(name in manual for name in names):
        rest = (name for name in around.axis_names if name not in manual)
        return Place(around, False, tuple(x for x in rest if around.shape[x] > 1))
    if any(name in manual for name in names):
        raise ValueError(
            f"{op}: of axis_name {names} only {tuple(manual)} are manual here. Make all of them "
            f"manual, or none: jax.shard_map(..., axis_names={set(names)})."
        )
    found = around if manual else find_mesh(names, mesh, around, arrays)
    if found is None:
        _refuse_vmap_axes(op, names)
        if not is_traced(arrays):
            raise ValueError(
                f"{op}: no mesh with axis {names[0]!r} is in sight. Call {op} inside jax.shard_map "
                f"over {names[0]!r}, or on arrays of all ranks with mesh=, under jax.set_mesh, or "
                "sharded over such a mesh."
            )
        return Place(None, True)
    missing = [name for name in names if name not in found.axis_names]
    if missing:
        raise ValueError(
            f"{op}: axis_name {missing[0]!r} is not an axis of the mesh here, which has "
            f"{tuple(found.axis_names)}. Name the axis whose devices are the ranks."
        )
    if not manual and all(kind == AxisType.Auto for kind in found.axis_types):
        return Place(found, True)
    return Place(found, True, tuple(name for name in found.axis_names if name not in manual))


def _refuse_vmap_axes(op: str, names: tuple[str, ...]) -> None:
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            continue
        raise ValueError(
            f"{op}: axis_name {name!r} is an axis of jax.vmap here, but the ranks must be devices. "
            "Map over another name, and name a mesh axis."
        )


def find_mesh(names: Sequence[str], mesh: Any, around: Any, arrays: Sequence[Any]) -> Any:
    """The mesh that the user gives or has set, or that an array lies on; with `names`, if any."""
    if mesh is not None:
        return mesh
    if any(name in around.axis_names for name in names):
        return around if is_traced(arrays) else jax.sharding.get_mesh()
    for array in arrays:
        is_placed = isinstance(array, jax.Array) and not is_traced([array])
        typed = getattr((array if is_placed else jax.typeof(array)).sharding, "mesh", None)
        if typed is not None and any(name in typed.axis_names for name in names):
            return typed
    return None if around.empty else around


def place_arrays(
    place: Place, names: tuple[str, ...], arrays: list[Any], num_storage: int
) -> list[Any]:
    """Brings global arrays to where the devices take them from; it is free where they lie there.

    The last `num_storage` arrays go where the first ones are.

    Dimensions behind the rows stay sharded as their type tells, or, over automatic axes, as they
    are.
    """
    if place.mesh is None:
        return arrays
    if place.open_axes:
        if all(kind != AxisType.Explicit for kind in place.mesh.axis_types):
            return arrays
        specs = _row_specs(names, arrays, place.open_axes, place.is_global, num_storage)
        move = retype if is_traced(arrays) else lambda x, *to: jax.device_put(x, NamedSharding(*to))
        return [move(x, place.mesh, spec) for x, spec in zip(arrays, specs, strict=True)]
    # The partitioner asks for the same; this tells it the mesh where no argument lies on one.
    free = lambda x: P(names, *(P.UNCONSTRAINED for _ in x.shape[1:]))
    constrain = jax.lax.with_sharding_constraint
    return [constrain(x, NamedSharding(place.mesh, free(x))) for x in arrays]


def is_traced(arrays: Iterable[Any]) -> bool:
    """Whether some of the arrays are known only when the program runs."""
    return any(isinstance(x, Tracer) for x in arrays)


def row_spec(sharding: Any, num_dims: int, rows: Any, is_free: Callable[[str], bool]) -> P:
    """Rows over `rows`, the other dimensions as they are, over those axes that are free."""
    spec = tuple(getattr(sharding, "spec", ())) + (None,) * num_dims
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    return P(rows, *(tuple(filter(is_free, axes_of(entry))) or None for entry in spec[1:num_dims]))


def _row_specs(names, arrays, open_axes, is_global, num_storage) -> list[P]:
    """How arrays are split over the axes that a `shard_map` of ours opens."""
    is_free = lambda axis: axis in open_axes and axis not in names
    rows = names if is_global else None
    first = arrays[: len(arrays) - num_storage]
    specs = [row_spec(jax.typeof(x).sharding, x.ndim, rows, is_free) for x in first]
    return specs + specs[:num_storage]


def retype(x: Any, mesh: Any, spec: P) -> Any:
    """Splits an array over the explicit axes of `spec`; types tell nothing of the others."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    typed = lambda entry: tuple(a for a in axes_of(entry) if kinds[a] == AxisType.Explicit) or None
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*map(typed, spec))))


def on_every_device(
    fn: Callable,
    operands: Sequence[Any],
    *,
    names: tuple[str, ...],
    open_axes: tuple[str, ...],
    is_global: bool,
    num_fields: int,
    num_results: int,
) -> list[Any]:
    """Calls `fn` with `open_axes` manual too: on any view of the fields, on one device's rows.

    Its results are sharded as the first of the arrays are. Over automatic axes, of which types do
    not tell, arrays are gathered. Called while lowering, so it is never differentiated.
    """
    fields, arrays = operands[:num_fields], operands[num_fields:]
    field_spec = P(names) if is_global else P()
    specs = _row_specs(names, arrays, open_axes, is_global, len(arrays) - num_results)
    around = jax.sharding.get_abstract_mesh()
    is_around = all(name in around.axis_names for name in open_axes)
    mesh = around if is_around else jax.typeof(arrays[0]).sharding.mesh
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        # Here, not before the call: without jit they may lie on one device, beside traced arrays.
        fields = [retype(x, mesh, field_spec) for x in fields]
    mapped = jax.shard_map(
        lambda *operands: fn(*operands),
        mesh=None if is_around else mesh,
        axis_names=set(open_axes),
        in_specs=(*(field_spec for _ in fields), *specs),
        out_specs=specs[:num_results],
        check_vma=False,
    )
    return mapped(*fields, *arrays)


def vary_with(fields: Iterable[Any], names: Sequence[str], arrays: list[Any]) -> list[Any]:
    """The arrays, made to vary over every mesh axis that the result depends on.

    These are the axes over which one of the fields varies, and those of the ranks.
    """
    axes = frozenset().union(*map(varying_axes, fields))
    if not all(axes.union(varying_axes(x)).issuperset(names) for x in arrays):
        for name in names:  # varying_axes is empty where JAX does not track it (check_vma=False)
            axes |= varying_axes(jax.lax.axis_index(name))
    return arrays if all(varying_axes(x) == axes for x in arrays) else vary_alike(arrays, also=axes)
