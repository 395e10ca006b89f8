"""Finds and extends the mesh axes over which arrays vary in `jax.shard_map` (`check_vma`)."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array

from jax_cp_dispatch._jax_private import get_axis_env


def vary_alike(arrays: Iterable[ArrayLike], *, also: Iterable[str] = ()) -> list[Array]:
    """Makes all arrays vary over the union of their mesh axes and `also`.

    JAX's operations do this themselves; ours need it for the operands of one primitive, for the
    initial and the next carry of a loop, and for an argument and its cotangent in a custom
    derivative. The transpose sums over the added axes. Outside `shard_map` it does nothing.
    """
    arrays = list(arrays)
    axes = frozenset(also).union(*map(varying_axes, arrays))
    return [_add_axes(x, axes - varying_axes(x)) for x in arrays]


def vary_like(arrays: Iterable[ArrayLike], like: ArrayLike) -> list[Array]:
    """Makes all arrays vary over the mesh axes of `like` too, as initial carries of a loop must."""
    return vary_alike(arrays, also=varying_axes(like))


def _add_axes(array: ArrayLike, axes: frozenset[str]) -> Array:
    return jax.lax.pcast(array, tuple(axes), to="varying") if axes else jnp.asarray(array)


def varying_axes(array: ArrayLike) -> frozenset[str]:
    """Returns the mesh axes over which an array varies."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def whole_on_explicit_axes(arrays: Iterable[ArrayLike]) -> list[Array]:
    """Returns arrays that no explicit mesh axis shards; their cotangents keep the sharding.

    For a function of one device's arrays, whose custom derivative has results of unsharded types.
    """
    return [_whole(x, jnp.ndim(x)) for x in arrays]


def whole_rows(tree: Any) -> Any:
    """Returns arrays whose first dimension no explicit mesh axis shards."""
    return jax.tree.map(lambda x: _whole(x, 1), tree)


def _whole(x: ArrayLike, num_dims: int) -> Array:
    x = jnp.asarray(x)
    sharding = jax.typeof(x).sharding
    split, rest = sharding.spec[:num_dims], sharding.spec[num_dims:]
    if all(entry is None for entry in split):
        return x
    whole = P(*(None for _ in split), *rest)
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, whole))


def mapped_axes() -> frozenset[str]:
    """Returns the mesh axes that `jax.vmap(..., spmd_axis_name=...)` hides here."""
    return frozenset(get_axis_env().spmd_axis_names)


def refuse_mapped_explicit_axes(op: str, mesh: Any) -> None:
    """Refuses a `jax.vmap` over arrays that are sharded over an explicit axis of `mesh`.

    A `shard_map` cannot make that axis manual, and its function would see arrays split over it.
    """
    mapped = sorted(frozenset(get_axis_env().explicit_mesh_axis_names) & set(mesh.axis_names))
    if mapped:
        raise ValueError(
            f"{op}: jax.vmap maps over arrays that are sharded over the explicit mesh axis "
            f"{mapped[0]!r}. Make that axis automatic (AxisType.Auto), and map with "
            f"spmd_axis_name={mapped[0]!r}."
        )


def can_check_varying() -> bool:
    """Whether this package's `shard_map` may track the axes over which arrays vary (`check_vma`).

    False inside a `shard_map` that does not: arrays would begin to vary over its axes, and their
    cotangents would not. False with `mapped_axes`: JAX makes arrays vary over them but does not
    show it. Then neither JAX's operations nor ours cast the other operands, and batched bodies of
    loops and branches keep their previous types.
    """
    around = jax.sharding.get_abstract_mesh().manual_axes
    is_checked = not around or bool(varying_axes(jax.lax.axis_index(around[0])))
    return is_checked and not mapped_axes()
