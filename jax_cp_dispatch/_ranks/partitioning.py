"""What Shardy rules of collective calls share: the mesh of the program, and a name of their own."""

from collections.abc import Callable
from typing import Any

from jax.experimental.xla_metadata import set_xla_metadata


def mesh_of_program(op: str, names: tuple[str, ...], mesh: Any, otherwise: Any) -> Any:
    """The mesh on which a partitioned program runs; it has the axes of the ranks.

    Args:
      op: begins the message of an error.
      names: the axes of the ranks.
      mesh: that `custom_partitioning` tells; it does not ask `jax.set_mesh`.
      otherwise: where that is empty.
    """
    mesh = otherwise if mesh.empty else mesh
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{op}: axis_name {missing[0]!r} is not an axis of the mesh on which this program "
            f"runs, {dict(mesh.shape)}. Name the axis whose devices are the ranks."
        )
    return mesh


def named(partitioned: Callable[..., Any], name: Any) -> Callable[..., Any]:
    """The same function, in a program that names everything its partition depends on.

    By itself the program names only the address of the partition, which a persistent compilation
    cache may ignore, and which another process may use for another call.
    """

    def with_name(*arrays):
        with set_xla_metadata(jax_cp_dispatch=repr(name)):
            return partitioned(*arrays)

    return with_name
