"""A function with a Shardy rule, whose program has the same key in every process.

JAX writes the address of the partition into the program, so that the persistent compilation cache
misses in every process. Here a digest of all that the partition depends on replaces the address.
"""

import copyreg
import functools
import hashlib
import pathlib
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
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
from jax_cp_dispatch._ranks.lowering import lower_opened, run_alone

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
