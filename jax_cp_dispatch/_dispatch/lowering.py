"""How a call becomes a program: our transport's custom call, XLA's collectives, or a partition.

No side effect is declared: one executable serves all devices of a program, so that removing,
merging or hoisting a call is the same on all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_cp_dispatch._dispatch.operands import (
    by_part,
    num_before_arrays,
    part_of_each,
    read_operands,
)
from jax_cp_dispatch._dispatch.partitioning import lower_partitioned
from jax_cp_dispatch._dispatch.xla_collectives import combine_with_xla, dispatch_with_xla
from jax_cp_dispatch._ranks.call_site import call_site_attributes, groups_of_program
from jax_cp_dispatch._ranks.gpu import (
    GPU_IMPLEMENTATIONS,
    all_ranks_here,
    gpu_attributes,
    remember_mesh,
)
from jax_cp_dispatch._ranks.implementations import choose_implementation
from jax_cp_dispatch._ranks.placement import on_every_device
from jax_cp_dispatch.cpu_devices import keep_freed_memory, warn_of_deadlock


def lower(primitive, by_xla, target, ctx, *operands, call, parts, **params):
    """The lowering rule of both primitives.

    `by_xla` computes one from operands and parameters, `target` names the other's custom call.
    """
    by_xla = functools.partial(by_xla, call=call, parts=parts, **params)
    if call.open_axes:
        with remember_mesh(ctx):
            return _lower_opened(primitive, ctx, *operands, call=call, parts=parts, **params)
    if call.is_global:
        if _is_for_gpu(primitive, ctx, call):
            by_xla = functools.partial(_on_one_gpu, target, ctx.avals_out, call=call, parts=parts)
        return lower_partitioned(
            primitive, ctx, *operands, call=call, parts=parts, on_one_device=by_xla, params=params
        )
    groups = groups_of_program(ctx, call.axis_names, call.group_axes, call.num_ranks)
    platforms = ctx.module_context.platforms
    name = choose_implementation(call.op, call.implementation, platforms, groups)
    if name == "xla":
        return mlir.lower_fun(by_xla, multiple_results=True)(ctx, *operands)
    if name in GPU_IMPLEMENTATIONS:
        places = gpu_attributes(ctx, name, call.axis_names, call.group_axes, call.num_ranks)
        return _lower_custom_call(target, ctx, *operands, call=call, parts=parts, **places)
    num_devices = jax.local_device_count("cpu")
    warn_of_deadlock(num_devices)
    if num_devices > 1:
        keep_freed_memory()
    site = call_site_attributes(
        ctx, _what(target, parts), call.axis_names, call.num_ranks, groups, name
    )
    return _lower_custom_call(target, ctx, *operands, call=call, parts=parts, **site)


def _is_for_gpu(primitive, ctx, call):
    platforms = ctx.module_context.platforms
    if set(platforms) != {"cuda"} or call.implementation not in (None, *GPU_IMPLEMENTATIONS):
        return False
    name = choose_implementation(call.op, call.implementation, platforms)
    return name in GPU_IMPLEMENTATIONS


def _on_one_gpu(target, avals_out, *operands, call, parts):
    """One device holds the rows of all ranks: the same custom call, with all of them."""
    shapes = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in avals_out]
    num_storage = _num_storage(operands, parts)
    aliases = {2 + len(operands) - num_storage + i: i for i in range(num_storage)}
    move = jax.ffi.ffi_call(target, shapes, input_output_aliases=aliases)
    none = jnp.int32(0)
    return move(none, none, *operands, **_attributes(call, parts), **all_ranks_here())


def _lower_custom_call(target, ctx, *operands, call, parts, **more):
    rank, group = mlir.lower_fun(
        lambda: (_place_on(call.axis_names), _place_on(call.group_axes)), multiple_results=True
    )(ctx.replace(avals_in=(), avals_out=None))
    place = jax.typeof(np.int32(0))
    operands = (rank, group, *operands)
    num_storage = _num_storage(ctx.avals_in, parts)
    aliases = {len(operands) - num_storage + i: i for i in range(num_storage)}
    return jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)(
        ctx.replace(avals_in=(place, place, *ctx.avals_in)),
        *operands,
        **_attributes(call, parts),
        **more,
    )


def _num_storage(operands, parts):
    return len(operands) - num_before_arrays(parts) - len(part_of_each(parts))


def _attributes(call, parts):
    return {
        "op": call.op,
        "axis": ",".join(call.axis_names),
        "num_ranks": np.int64(call.num_ranks),
        "deadline_ms": np.int64(call.deadline_ms),
        "capacity_names": ",".join(part.capacity_name for part in parts),
        "has_src_offset": _span(part.has_src_offset for part in parts),
        "has_stamp": _span(part.has_stamp for part in parts),
        "num_arrays": _span(part.num_arrays for part in parts),
        "num_tokens": _span(part.num_tokens for part in parts),
        "capacity": _span(part.capacity for part in parts),
        "buffer": _span(part.buffer for part in parts),
    }


def _what(target, parts):
    """The operation and what of its parts the shapes do not tell."""
    rows = "; ".join(f"{part.num_tokens} tokens, capacity {part.capacity}" for part in parts)
    return f"{target.rpartition('.')[2]} of {rows}"


def _lower_opened(primitive, ctx, *operands, call, parts, **params):
    """Every device runs its part inside a `shard_map` over the axes that are not manual yet."""
    mesh = jax.sharding.get_abstract_mesh()
    if not all(name in mesh.axis_names for name in call.open_axes):  # known by the types alone
        mesh = ctx.avals_in[-1].sharding.mesh
    local_call = call.on_one_rank(mesh)

    def opened(*moved):
        return on_every_device(
            lambda *moved: primitive.bind(*moved, call=local_call, parts=parts, **params),
            moved,
            names=call.axis_names,
            open_axes=call.open_axes,
            is_global=call.is_global,
            num_fields=num_before_arrays(parts),
            num_results=sum(part.num_arrays for part in parts),
        )

    return mlir.lower_fun(opened, multiple_results=True)(ctx, *operands)


def _place_on(axes):
    """A device's place on mesh axes. One number for all, because device numbers do not tell it."""
    if not axes:
        return jnp.int32(0)
    return jax.lax.axis_index(axes if len(axes) > 1 else axes[0])  # the second is much cheaper


def _span(values):
    return np.array(list(values), np.int64)


def dispatch_by_xla(*operands, call, parts):
    """`dispatch_p` from XLA's collectives."""
    split = read_operands(operands, parts)
    if call.by_collectives is not None:
        return call.by_collectives(split.arrays)
    outs = []
    for part, metadata, stamp, arrays in zip(
        parts, split.metadata, split.stamps, by_part(split.arrays, parts), strict=True
    ):
        outs += dispatch_with_xla(
            _place_on(_axes_to_gather(call)),
            metadata,
            _without_padding(arrays, part.num_tokens),
            axis_names=_axes_to_gather(call),
            num_ranks=call.num_ranks,
            capacity=part.capacity,
            stamp=stamp,
        )
    return outs


def combine_by_xla(*operands, call, parts, dtypes):
    """`combine_p` from XLA's collectives."""
    split = read_operands(operands, parts)
    if call.by_collectives is not None:
        moved = call.by_collectives(split.arrays)
        return [y.astype(dtype) for y, dtype in zip(moved, dtypes, strict=True)]
    outs = []
    of_parts = by_part(split.arrays, parts), by_part(dtypes, parts)
    for part, metadata, stamp, arrays, dtypes_out in zip(
        parts, split.metadata, split.stamps, *of_parts, strict=True
    ):
        outs += combine_with_xla(
            _place_on(_axes_to_gather(call)),
            metadata,
            _without_padding(arrays, part.capacity),
            axis_names=_axes_to_gather(call),
            num_ranks=call.num_ranks,
            num_tokens=part.num_tokens,
            dtypes=dtypes_out,
            stamp=stamp,
        )
    return outs


def _axes_to_gather(call):
    """None where one device holds the rows of all ranks already."""
    return () if call.is_global else call.axis_names


def _without_padding(arrays, num_rows):
    """Arrays without rows came padded, so that no operand of a custom call is empty."""
    return [x[:0] for x in arrays] if num_rows == 0 else arrays
