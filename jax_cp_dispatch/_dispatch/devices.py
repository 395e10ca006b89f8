"""Places the rows of a call on the devices of a mesh."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch.exchange_operands import Exchange
from jax_cp_dispatch._ranks.call_context import CallContext, is_traced, retype, with_manual_axes
from jax_cp_dispatch._ranks.varying import vary_alike, varying_axes


def place_arrays(
    context: CallContext, names: tuple[str, ...], arrays: list[Any], num_storage: int
) -> list[Any]:
    """Moves global arrays to the devices that use them; free if they are already there.

    The last `num_storage` arrays are placed like the first ones.

    Dimensions after the rows keep the sharding of their type, or, over automatic axes, their actual
    sharding.
    """
    if context.mesh is None:
        return arrays
    if context.open_axes:
        if all(kind != AxisType.Explicit for kind in context.mesh.axis_types):
            return arrays
        specs = _row_specs(names, arrays, context.open_axes, context.is_global, num_storage)
        move = retype if is_traced(arrays) else lambda x, *to: jax.device_put(x, NamedSharding(*to))
        return [move(x, context.mesh, spec) for x, spec in zip(arrays, specs, strict=True)]
    # The partitioner requests the same; this conveys the mesh if no argument has one.
    free = lambda x: P(names, *(P.UNCONSTRAINED for _ in x.shape[1:]))
    constrain = jax.lax.with_sharding_constraint
    return [constrain(x, NamedSharding(context.mesh, free(x))) for x in arrays]


def row_spec(sharding: Any, num_dims: int, rows: Any, is_free: Callable[[str], bool]) -> P:
    """Returns a spec with rows over `rows`; other dimensions keep their free axes."""
    spec = tuple(getattr(sharding, "spec", ())) + (None,) * num_dims
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    return P(rows, *(tuple(filter(is_free, axes_of(entry))) or None for entry in spec[1:num_dims]))


def _row_specs(names, arrays, open_axes, is_global, num_storage) -> list[P]:
    """Returns how arrays are split over the axes that our `shard_map` makes manual."""
    is_free = lambda axis: axis in open_axes and axis not in names
    rows = names if is_global else None
    first = arrays[: len(arrays) - num_storage]
    specs = [row_spec(jax.typeof(x).sharding, x.ndim, rows, is_free) for x in first]
    return specs + specs[:num_storage]


def on_every_device(
    fn: Callable[[Any], Callable[..., list[Any]]], operands: Sequence[Any], exchange: Exchange
) -> list[Any]:
    """Calls `fn(mesh)` with all axes manual, on any view of the fields and one device's rows.

    Results are sharded like the first arrays. Arrays are gathered over automatic axes, which types
    do not show. Called during lowering, so it is never differentiated.
    """
    num_fields, num_results = exchange.num_before_arrays, exchange.num_arrays
    fields, arrays = operands[:num_fields], operands[num_fields:]
    names, open_axes = exchange.comm.axis_names, exchange.comm.open_axes
    field_spec = P(names) if exchange.is_global else P()
    specs = _row_specs(names, arrays, open_axes, exchange.is_global, len(arrays) - num_results)
    mesh = jax.sharding.get_abstract_mesh()
    if not all(name in mesh.axis_names for name in open_axes):  # known by the types alone
        mesh = jax.typeof(arrays[0]).sharding.mesh
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        # Here and not before the call: without jit they may be on one device, next to traced
        # arrays.
        fields = [retype(x, mesh, field_spec) for x in fields]
    in_specs = (*(field_spec for _ in fields), *specs)
    mapped = with_manual_axes(
        fn(mesh), open_axes, mesh, in_specs=in_specs, out_specs=specs[:num_results]
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
