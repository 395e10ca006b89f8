"""What every primitive of a collective call needs around its custom call.

A primitive is also called outside of `jit`, and mapped by `jax.vmap`; its lowering opens mesh axes,
chooses a transport, prepares the CPU's devices, and gives the custom call its rank and group.
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
    """The primitive outside of `jit`: a program of its own, compiled once."""
    with jax.disable_jit(False):  # else `bind` comes back here
        return _compiled(primitive, tuple(params.items()))(*operands)


@functools.lru_cache(maxsize=1024)
def _compiled(primitive, params):
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def one_after_another(
    primitive: Primitive, operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """A batching rule: one call per example, of which every rank has the same number."""
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def one(example):
        rest = iter(example)
        each = [x if d is None else next(rest) for x, d in zip(operands, dims, strict=True)]
        return primitive.bind(*each, **params)

    results = jax.lax.map(one, mapped)
    return results, jax.tree.map(lambda _: 0, results)


# ---- Lowering.


class Transport(NamedTuple):
    """What serves one call.

    Attributes:
      name: of the implementation.
      groups: the processes of the ranks; see `groups_of_program`.
    """

    name: str
    groups: Groups | None


def choose_transport(ctx: Any, op: str, comm: Communicator) -> Transport:
    """What serves a call of `op` in the program that is lowered."""
    groups = groups_of_program(ctx, comm)
    platforms = ctx.module_context.platforms
    return Transport(choose_implementation(op, comm.implementation, platforms, groups), groups)


def prepare_cpu_devices() -> None:
    """Before ranks on CPU devices wait for each other."""
    num_devices = jax.local_device_count("cpu")
    warn_of_deadlock(num_devices)
    if num_devices > 1:
        keep_freed_memory()


def lower_opened(fn: Callable[..., Any], ctx: Any, *operands: Any) -> Any:
    """Lowers `fn`, which makes mesh axes manual that are not yet: see `with_manual_axes`."""
    with remember_mesh(ctx):
        return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands)


def lower_places(ctx: Any, comm: Communicator) -> tuple[list[Any], list[Any]]:
    """A device's rank and its group: the first operands of a custom call, and their types."""
    places = lambda: (place_on(comm.axis_names), place_on(comm.group_axes))
    lowered = mlir.lower_fun(places, multiple_results=True)
    return list(lowered(ctx.replace(avals_in=(), avals_out=None))), [jax.typeof(np.int32(0))] * 2
