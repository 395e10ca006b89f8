"""Common rules of the primitives of collective calls: custom calls and Shardy rules.

A primitive may be called outside `jit` or mapped by `jax.vmap`. Its lowering makes mesh axes
manual, chooses an implementation, prepares CPU devices, and passes rank and group to a custom call.
"""

import copyreg
import functools
import hashlib
import pathlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch._jax_private import (
    prim_requires_devices_during_lowering,
    sharding_callbacks,
)
from jax_cp_dispatch._ranks.communicator import (
    Communicator,
    Groups,
    mesh_around,
    mesh_groups,
)
from jax_cp_dispatch._ranks.implementations import (
    IMPLEMENTATIONS,
    XLA,
    Implementation,
    choose_implementation,
)
from jax_cp_dispatch._text import say_once
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
    """The implementation of one call in the program that is being lowered."""

    implementation: Implementation
    groups: Groups | None  # the devices of the ranks; see `mesh_groups`


def choose(ctx: Any, op: str, comm: Communicator, *, on_one_device: bool = False) -> Chosen:
    """Chooses the implementation of a call of `op` in the program that is being lowered.

    If `on_one_device`, one device holds the rows of all ranks.
    """
    wanted, platforms = comm.implementation, ctx.module_context.platforms
    if on_one_device:
        is_on_gpus = set(platforms) == {"cuda"}
        if not is_on_gpus or (wanted and IMPLEMENTATIONS[wanted].platform != "cuda"):
            return Chosen(XLA, None)
        here = (jax.local_devices()[0],) * comm.num_ranks
        return Chosen(choose_implementation(op, wanted, platforms, (here,)), None)
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    groups = mesh_groups(mesh, comm.axis_names, comm.group_axes)
    return Chosen(choose_implementation(op, wanted, platforms, groups), groups)


def fall_back(choice: Chosen, op: str, comm: Communicator, missing: str) -> Chosen:
    """Returns XLA's choice where a GPU transport does not support a call, or refuses it."""
    if comm.implementation is not None:
        IMPLEMENTATIONS[comm.implementation].refuse(op, missing)
    say_once(f"{op}: XLA serves this call (implementation='xla'): {missing}.")
    return choice._replace(implementation=XLA)


def prepare_cpu_devices() -> None:
    """Prepares CPU devices for ranks that wait for each other."""
    num_devices = jax.local_device_count("cpu")
    warn_of_deadlock(num_devices)
    if num_devices > 1:
        keep_freed_memory()


def lower_opened(fn: Callable[..., Any], ctx: Any, *operands: Any) -> Any:
    """Lowers `fn`, which makes further mesh axes manual; see `with_manual_axes`."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    is_concrete = isinstance(mesh, jax.sharding.Mesh) and not mesh.empty
    token = mesh_around.set(mesh if is_concrete else mesh_around.get())
    try:
        return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands)
    finally:
        mesh_around.reset(token)


def program_mesh(op: str, names: tuple[str, ...], mesh: Any, otherwise: Any) -> Any:
    """Returns the mesh on which a partitioned program runs; it must have the axes of the ranks.

    That is `mesh`, of `custom_partitioning`, which ignores `jax.set_mesh`; if empty, the other.
    """
    mesh = otherwise if mesh.empty else mesh
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{op}: axis_name {missing[0]!r} is not an axis of the mesh on which this program "
            f"runs, {dict(mesh.shape)}. Name the axis whose devices are the ranks."
        )
    return mesh


# ---- A function with a Shardy rule, whose program has the same key in every process.
#
# JAX writes the address of the partition into the program, so that the persistent compilation cache
# misses in every process. Here a digest of all that the partition depends on replaces the address.

_TARGET = "CustomSPMDPartitioning"


def partitioned(
    fn: Callable[..., list[Any]],
    partition: Callable[..., Any],
    *,
    name: Hashable,
    on_tpus: Callable[..., list[Any]],
    **rule: Any,
) -> Callable[..., list[Any]]:
    """Returns `fn` as a function that the partitioner splits by `partition`.

    Args:
      fn: computes the results where one device has everything.
      partition: as in `custom_partitioning`.
      name: everything that `partition` depends on, and nothing that another process names
        differently.
      on_tpus: the same for XLA's compiler for TPUs, which has no such rules.
      rule: the other arguments of `def_partition`.
    """
    everywhere = custom_partitioning(fn)
    everywhere.def_partition(partition=partition, **rule)
    return functools.partial(_partitioned_p.bind, fn=everywhere, name=name, on_tpus=on_tpus)


def can_partition(ctx: Any) -> bool:
    """Whether a lowering may use a partition."""
    module = ctx.module_context
    return "tpu" not in module.platforms or module.axis_context.num_devices == 1


def _shapes(*avals, fn, **_):
    shapes = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))
    return [ShapedArray(x.shape, x.dtype) for x in shapes]


def _lower(ctx, *operands, fn, name, on_tpus):
    if not can_partition(ctx):
        return lower_opened(on_tpus, ctx, *operands)

    def with_name(*arrays):
        # For users who let the cache ignore what stands in place of the address.
        with set_xla_metadata(jax_cp_dispatch=repr(name)):
            return fn(*arrays)

    results = mlir.lower_fun(with_name, multiple_results=True)(ctx, *operands)
    attributes = getattr(getattr(results[0], "owner", None), "attributes", {})
    if sharding_callbacks is None or "call_target_name" not in attributes:
        return results
    if attributes["call_target_name"].value == _TARGET:  # otherwise one device has everything
        _replace_address(ctx, attributes, name)
    return results


_lock = threading.Lock()


def _replace_address(ctx, attributes, name) -> None:
    address = attributes["backend_config"]
    info = sharding_callbacks[address.value.encode()]
    # `serialize_executable` leaves the partition out: all is compiled.
    copyreg.pickle(type(info), lambda _: (object, ()))
    config: Any = jax.config  # its options are not declared
    is_cached = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    mesh = jax.sharding.get_mesh() if info.mesh.empty else info.mesh
    if not is_cached or mesh.empty:
        return
    key = _digest(ctx, info, mesh, name)
    with _lock:  # programs with equal keys share a partition, which lives as long as one of them
        info = sharding_callbacks.setdefault(key.encode(), info)
        ctx.module_context.add_keepalive(info)
    attributes["backend_config"] = type(address).get(key)


def _digest(ctx, info, mesh, name) -> str:
    """Returns a digest of everything on which the compiled program depends.

    The part of one device, with no dimension sharded but those of the ranks, stands for what
    lowering reads from this process, such as the transport and the environment. A program from the
    cache does not lower it otherwise, so this also prepares the process.
    """
    shapes = lambda avals: [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())) for x in avals
    ]
    operands = shapes(ctx.avals_in)
    mesh, each, outs, ins = info.partition(mesh, operands, shapes(ctx.avals_out))
    specs = {"in_specs": tuple(x.spec for x in ins), "out_specs": [x.spec for x in outs]}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        part = jax.jit(jax.shard_map(each, mesh=mesh, check_vma=False, **specs)).lower(*operands)
    devices = [(device.platform, device.process_index, device.id) for device in mesh.devices.flat]
    known = name, mesh.shape_tuple, devices, _sources(), part.as_text()
    return hashlib.sha256(repr(known).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """Returns a digest of this package: its next version may partition differently."""
    package = pathlib.Path(__file__).parents[1]
    files = [(str(x.relative_to(package)), x.read_bytes()) for x in package.rglob("*.py")]
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()


_partitioned_p = Primitive("partitioned")
_partitioned_p.multiple_results = True
_partitioned_p.def_abstract_eval(_shapes)
_partitioned_p.def_impl(functools.partial(run_alone, _partitioned_p))
mlir.register_lowering(_partitioned_p, _lower)
prim_requires_devices_during_lowering.add(_partitioned_p)
