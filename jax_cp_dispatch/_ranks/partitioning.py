"""Common parts of Shardy rules of collective calls: the program's mesh, and unique names."""

from collections.abc import Callable
from typing import Any

from jax.experimental.xla_metadata import set_xla_metadata


def can_partition(ctx: Any) -> bool:
    """Whether a lowering may use `custom_partitioning`, which XLA's compiler for TPUs lacks."""
    module = ctx.module_context
    return "tpu" not in module.platforms or module.axis_context.num_devices == 1


def program_mesh(op: str, names: tuple[str, ...], mesh: Any, otherwise: Any) -> Any:
    """Returns the mesh on which a partitioned program runs; it must have the axes of the ranks.

    Args:
      op: the public operation, for error messages.
      names: the axes of the ranks.
      mesh: the mesh of `custom_partitioning`, which ignores `jax.set_mesh`.
      otherwise: the mesh to use if that is empty.
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
    """Returns the same function, in a program that names everything its partition depends on.

    Otherwise the program contains only the address of the partition. A persistent compilation cache
    may ignore it, and another process may use the same address for another call.
    """

    def with_name(*arrays):
        with set_xla_metadata(jax_cp_dispatch=repr(name)):
            return partitioned(*arrays)

    return with_name
