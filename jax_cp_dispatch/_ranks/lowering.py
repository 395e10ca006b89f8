"""Common rules of the primitives of collective calls, around their custom calls.

A primitive may be called outside `jit` or mapped by `jax.vmap`. Its lowering makes mesh axes
manual, chooses a transport, prepares CPU devices, and passes rank and group to the custom call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_cp_dispatch._ranks.axis import place_on
from jax_cp_dispatch._ranks.call_site import Groups, groups_of_program
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.gpu import remember_mesh
from jax_cp_dispatch._ranks.implementations import choose_implementation
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


class Transport(NamedTuple):
    """The transport of one call.

    Attributes:
      name: name of the implementation.
      groups: the processes of the ranks; see `groups_of_program`.
    """

    name: str
    groups: Groups | None


def choose_transport(ctx: Any, op: str, comm: Communicator) -> Transport:
    """Chooses the transport of a call of `op` in the program that is being lowered."""
    groups = groups_of_program(ctx, comm)
    platforms = ctx.module_context.platforms
    return Transport(choose_implementation(op, comm.implementation, platforms, groups), groups)


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


def lower_places(ctx: Any, comm: Communicator) -> tuple[list[Any], list[Any]]:
    """Lowers a device's rank and group, the first operands of a custom call; also their types."""
    places = lambda: (place_on(comm.axis_names), place_on(comm.group_axes))
    lowered = mlir.lower_fun(places, multiple_results=True)
    return list(lowered(ctx.replace(avals_in=(), avals_out=None))), [jax.typeof(np.int32(0))] * 2
