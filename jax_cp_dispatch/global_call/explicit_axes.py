"""The explicit mesh axes of a call inside `jax.shard_map`, on one rank: they become manual too.

Few operations of JAX accept arrays that an explicit axis shards.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_cp_dispatch.global_call.mesh_axes import (
    MeshAxes,
    Search,
    explicit_names,
    sharding_axes,
    warn_of_plan,
)


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
    batch = sharding_axes(arrays, 0, mesh, set())
    if batch and covers_batch:
        warn_of_plan(Search(op, arrays, mesh), batch)
        batch = ()
    return MeshAxes(mesh, (), batch, sharding_axes(arrays, 2, mesh, set(batch)))


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
