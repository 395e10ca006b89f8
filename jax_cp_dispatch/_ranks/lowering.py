"""Common rules of the primitives of collective calls: custom calls and Shardy rules.

A primitive may be called outside `jit` or mapped by `jax.vmap`. Its lowering makes mesh axes
manual, chooses an implementation, prepares CPU devices, and passes rank and group to a custom call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_cp_dispatch._ranks.call_site import program_groups, remember_mesh
from jax_cp_dispatch._ranks.communicator import Communicator, Groups, rank_index
from jax_cp_dispatch._ranks.implementations import (
    Implementation,
    Operation,
    choose_implementation,
    fall_back_to_xla,
)
from jax_cp_dispatch.cpu_devices import keep_freed_memory, warn_of_deadlock

# ---- Outside of `jit`, and under `jax.vmap`.


def run_alone(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Runs the primitive outside `jit`, as a separate program that is compiled once."""
    with jax.disable_jit(False):  # otherwise `bind` would recurse
        return _compiled(primitive, tuple(params.items()))(*operands)


@functools.lru_cache(maxsize=1024)
def _compiled(primitive, params):
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def one_after_another(
    primitive: Primitive, operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """A batching rule: one call per example; every rank has the same number of examples."""
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def one(example):
        rest = iter(example)
        each = [x if d is None else next(rest) for x, d in zip(operands, dims, strict=True)]
        return primitive.bind(*each, **params)

    results = jax.lax.map(one, mapped)
    return results, jax.tree.map(lambda _: 0, results)


# ---- Lowering.


class Chosen(NamedTuple):
    """The implementation of one call in the program that is being lowered.

    Attributes:
      implementation: the chosen one.
      groups: the devices of the ranks; see `program_groups`.
    """

    implementation: Implementation
    groups: Groups | None

    def lower(self, operation: Operation, ctx: Any, *operands: Any, **call: Any) -> Any:
        """Lowers an operation by the rule of the implementation."""
        return self.implementation.lowerings[operation](ctx, *operands, choice=self, **call)

    def rank_attributes(self, ctx: Any, comm: Communicator, what: str) -> dict[str, Any]:
        """Returns the attributes by which a custom call finds its ranks; see `Implementation`."""
        return self.implementation.rank_attributes(ctx, comm, self.groups, what)


def choose(ctx: Any, op: str, comm: Communicator) -> Chosen:
    """Chooses the implementation of a call of `op` in the program that is being lowered."""
    groups = program_groups(ctx, comm)
    platforms = ctx.module_context.platforms
    return Chosen(choose_implementation(op, comm.implementation, platforms, groups), groups)


def fall_back(choice: Chosen, op: str, comm: Communicator, missing: str) -> Chosen:
    """Returns XLA's choice where a GPU transport does not support a call, or refuses it."""
    return choice._replace(implementation=fall_back_to_xla(op, comm.implementation, missing))


def prepare_cpu_devices() -> None:
    """Prepares CPU devices for ranks that wait for each other."""
    num_devices = jax.local_device_count("cpu")
    warn_of_deadlock(num_devices)
    if num_devices > 1:
        keep_freed_memory()


def lower_opened(fn: Callable[..., Any], ctx: Any, *operands: Any) -> Any:
    """Lowers `fn`, which makes further mesh axes manual; see `with_manual_axes`."""
    with remember_mesh(ctx):
        return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands)


def rank_and_group(comm: Communicator) -> list[Any]:
    """Returns a device's rank and group, the first operands of a custom call."""
    return [rank_index(comm.axis_names), rank_index(comm.group_axes)]


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
