"""Over which mesh axes an array varies inside `jax.shard_map` (with `check_vma`)."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax._src.core import get_axis_env  # nothing public tells the axes of jax.vmap
from jax.typing import ArrayLike
from jaxtyping import Array


def vary_alike(arrays: Iterable[ArrayLike], *, also: Iterable[str] = ()) -> list[Array]:
    """Makes all arrays vary over the union of their mesh axes and `also`.

    Operations of ours need it where JAX's own do it by themselves: operands of one primitive, the
    first and the next carry of a loop, an argument and its cotangent in a custom derivative. Its
    transpose sums over the axes that were added. Outside `shard_map` it does nothing.
    """
    arrays = list(arrays)
    axes = frozenset(also).union(*map(varying_axes, arrays))
    return [_add_axes(x, axes - varying_axes(x)) for x in arrays]


def vary_like(arrays: Iterable[ArrayLike], like: ArrayLike) -> list[Array]:
    """Makes all arrays vary over the mesh axes of `like` too: the first carries of a loop."""
    return vary_alike(arrays, also=varying_axes(like))


def _add_axes(array: ArrayLike, axes: frozenset[str]) -> Array:
    return jax.lax.pcast(array, tuple(axes), to="varying") if axes else jnp.asarray(array)


def varying_axes(array: ArrayLike) -> frozenset[str]:
    """The mesh axes over which an array varies."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def mapped_axes() -> frozenset[str]:
    """The mesh axes that `jax.vmap(..., spmd_axis_name=...)` hides from the function here."""
    return frozenset(get_axis_env().spmd_axis_names)


def mapped_explicit_axes() -> frozenset[str]:
    """The explicit mesh axes over which `jax.vmap` maps the function here."""
    return frozenset(get_axis_env().explicit_mesh_axis_names)


def can_check_varying() -> bool:
    """Whether a `shard_map` of ours may track over which axes its arrays vary (`check_vma`).

    Not with `mapped_axes`. JAX makes arrays vary over them but does not show it, so that neither
    JAX's operations nor ours cast other operands alike, and the batched bodies of loops and
    branches keep the types that they had before.
    """
    return not mapped_axes()
