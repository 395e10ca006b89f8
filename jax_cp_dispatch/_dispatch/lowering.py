"""Lowers an exchange: opens its axes, splits arrays of all ranks, and chooses an implementation.

No side effect is declared: all devices of a program run one executable, so a call is removed,
merged or hoisted on all of them alike.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch import xla
from jax_cp_dispatch._dispatch.arguments import Exchange, ExchangeOperands, read_operands
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.gpu import all_ranks_here
from jax_cp_dispatch._ranks.implementations import (
    ON_CPU,
    ON_GPU,
    XLA,
    Operation,
    choose_on_one_device,
    fall_back_to_xla,
    register_lowering,
)
from jax_cp_dispatch._ranks.lowering import (
    Chosen,
    choose,
    fall_back,
    lower_opened,
    partitioned,
    prepare_cpu_devices,
    program_mesh,
    rank_and_group,
)
from jax_cp_dispatch._ranks.options import (
    CallContext,
    place,
    retype,
    vary_alike,
    varying_axes,
    with_manual_axes,
)

# ---- The custom call of an exchange: what CPUs and GPUs read alike, and its lowering for each.


def handler_name(exchange: Exchange) -> str:
    """Returns the name of the handler."""
    return runtime.DISPATCH_TARGET if exchange.sums is None else runtime.COMBINE_TARGET


def start_handler_name(exchange: Exchange) -> str:
    """Returns the name of the handler of the first of two calls, on GPUs."""
    return f"{handler_name(exchange)}_start"


def handler_attributes(exchange: Exchange) -> dict[str, Any]:
    """Returns what a handler reads besides the places of the ranks."""
    groups = exchange.groups
    return {
        "op": exchange.op,
        **exchange.comm.attributes(),
        "capacity_names": ",".join(group.capacity_name for group in groups),
        "has_src_offset": _span(group.has_src_offset for group in groups),
        "has_weights": _span(group.has_weights for group in groups),
        "has_fingerprint": _span(group.has_fingerprint for group in groups),
        "num_arrays": _span(group.num_arrays for group in groups),
        "num_tokens": _span(group.num_tokens for group in groups),
        "capacity": _span(group.capacity for group in groups),
        "buffer": _span(group.buffer for group in groups),
    }


def storage_aliases(exchange: Exchange, operands: Any) -> dict[int, int]:
    """Returns which operand of the handler is the storage of which result.

    `operands` are those of the primitive; the handler's begin with rank and group.
    """
    num_storage = exchange.num_storage(operands)
    return {2 + len(operands) - num_storage + i: i for i in range(num_storage)}


def _span(values: Any) -> np.ndarray:
    return np.array(list(values), np.int64)


def call_handler(
    avals_out: Any, exchange: Exchange, attributes: dict[str, Any], *operands: Any
) -> list[Any]:
    """Makes the call; `operands` are those of the primitive."""
    handler = jax.ffi.ffi_call(
        handler_name(exchange),
        like(avals_out),
        input_output_aliases=storage_aliases(exchange, operands),
    )
    return list(handler(*places(exchange), *operands, **attributes))


def places(exchange: Exchange) -> list[Any]:
    """Returns the device's rank and group, the first operands; 0 if one device holds all ranks."""
    return rank_and_group(Communicator() if exchange.is_global else exchange.comm)


def like(avals: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes alone."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def lower_on_cpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank between CPU devices."""
    prepare_cpu_devices()
    ranks = choice.rank_attributes(ctx, exchange.comm, _what(exchange))
    attributes = handler_attributes(exchange) | ranks
    call = functools.partial(call_handler, ctx.avals_out, exchange, attributes)
    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _what(exchange: Exchange) -> str:
    """Describes the operation, and the properties of its groups that shapes do not show."""
    rows = "; ".join(f"{x.num_tokens} tokens, capacity {x.capacity}" for x in exchange.groups)
    return f"{handler_name(exchange).rpartition('.')[2]} of {rows}"


_MAX_ARRAYS = 64  # of one call, as in csrc/kernels/call.h
_ALL = 0  # multiprocessors, for the handler
_MOST_SMS = 2**31 - 1  # of any GPU


def what_gpus_lack(exchange: Exchange) -> str | None:
    """Returns why an exchange needs XLA, whatever the transport; None if it does not."""
    if any(group.has_weights for group in exchange.groups):
        return "rows have weights"
    if exchange.num_arrays <= _MAX_ARRAYS:
        return None
    return f"{exchange.num_arrays} arrays, but a call on GPUs takes at most {_MAX_ARRAYS}"


def lower_on_gpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank."""
    ranks = choice.rank_attributes(ctx, exchange.comm, "")
    move = functools.partial(call_handler, ctx.avals_out, exchange, _attributes(exchange, ranks))
    return mlir.lower_fun(move, multiple_results=True)(ctx, *operands)


def on_one_gpu(ctx: Any, exchange: Exchange) -> Callable[..., Any]:
    """Returns the exchange of a device that holds the rows of all ranks, to be traced."""
    attributes = _attributes(exchange, all_ranks_here())
    return functools.partial(call_handler, ctx.avals_out, exchange, attributes)


def start_on_gpu(
    ctx: Any, *operands: Any, exchange: Exchange, num_beside: int, choice: Chosen
) -> Any:
    """Lowers the first call of two.

    It puts the exchange on a stream of the package and returns; the second call makes the program's
    stream wait. XLA keeps the memory that the exchange uses, because the second call takes all
    results of the first; and it puts the work between them, because optimization barriers make the
    work depend on `held`, and the second call on both.
    """
    ranks = all_ranks_here()
    if not exchange.is_global:
        ranks = choice.rank_attributes(ctx, exchange.comm, "")
    start = functools.partial(_start, ctx.avals_out, ranks, exchange, num_beside)
    return mlir.lower_fun(start, multiple_results=True)(ctx, *operands)


def _start(
    avals_out: Any, ranks: dict[str, Any], exchange: Exchange, num_beside: int, *operands: Any
) -> list[Any]:
    num_moving = len(operands) - num_beside
    moving, beside = operands[:num_moving], operands[num_moving:]
    first_two, n = places(exchange), exchange.num_arrays
    first = len(first_two) + exchange.num_before_arrays
    call = jax.ffi.ffi_call(
        start_handler_name(exchange),
        like(avals_out[: 2 * n + 1]),
        input_output_aliases={first + i: n + i for i in range(n)},
        has_side_effect=True,  # two calls of the same exchange must not become one
    )
    *started, held = call(*first_two, *moving, **_attributes(exchange, ranks))
    return [*started, *_one_after_another(held, beside)]


def done_on_gpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the second call."""
    done = functools.partial(_done, exchange)
    return mlir.lower_fun(done, multiple_results=True)(ctx, *operands)


def _done(exchange: Exchange, *operands: Any) -> list[Any]:
    n = exchange.num_arrays
    rest = operands[exchange.num_before_arrays :]
    held, *beside = _one_after_another(rest[2 * n], rest[2 * n + 1 :])
    call = jax.ffi.ffi_call(
        runtime.EXCHANGE_DONE_TARGET,
        like(rest[:n]),
        input_output_aliases={i: i for i in range(n)},
        has_side_effect=True,  # it stays where it is
    )
    return [*call(*rest[: 2 * n], held), *beside]


def _one_after_another(held: Any, beside: Any) -> list[Any]:
    """Returns all values; whatever reads one of them depends on all."""
    return list(jax.lax.optimization_barrier((held, *beside))) if beside else [held]


def _attributes(exchange: Exchange, ranks: dict[str, Any]) -> dict[str, Any]:
    return {
        **handler_attributes(exchange),
        **ranks,
        "num_comm_sm": np.int64(min(exchange.num_comm_sm or _ALL, _MOST_SMS)),
    }


# ---- Calls on arrays of all ranks: a Shardy rule, and each device's part.
#
# Rows are sharded over the axis of the ranks. Every other dimension keeps its sharding, so heads
# stay
# on their tensor-parallel devices. Each index of the other mesh axes is an independent group of
# ranks.


def place_arrays(
    context: CallContext, names: tuple[str, ...], arrays: list[Any], num_storage: int
) -> list[Any]:
    """Moves global arrays to the devices that use them; free if they are already there.

    The last `num_storage` arrays are placed like the first ones.

    Dimensions after the rows keep the sharding of their type, or, over automatic axes, their actual
    sharding.
    """
    if context.mesh is None:
        return arrays
    if context.open_axes:
        if all(kind != AxisType.Explicit for kind in context.mesh.axis_types):
            return arrays
        specs = _row_specs(names, arrays, context.open_axes, context.is_global, num_storage)
        return [place(x, context.mesh, spec) for x, spec in zip(arrays, specs, strict=True)]
    # The partitioner requests the same; this conveys the mesh if no argument has one.
    free = lambda x: P(names, *(P.UNCONSTRAINED for _ in x.shape[1:]))
    constrain = jax.lax.with_sharding_constraint
    return [constrain(x, NamedSharding(context.mesh, free(x))) for x in arrays]


def row_spec(sharding: Any, num_dims: int, rows: Any, is_free: Callable[[str], bool]) -> P:
    """Returns a spec with rows over `rows`; other dimensions keep their free axes."""
    spec = tuple(getattr(sharding, "spec", ())) + (None,) * num_dims
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    return P(rows, *(tuple(filter(is_free, axes_of(entry))) or None for entry in spec[1:num_dims]))


def _row_specs(names, arrays, open_axes, is_global, num_storage) -> list[P]:
    """Returns how arrays are split over the axes that our `shard_map` makes manual."""
    is_free = lambda axis: axis in open_axes and axis not in names
    rows = names if is_global else None
    first = arrays[: len(arrays) - num_storage]
    specs = [row_spec(jax.typeof(x).sharding, x.ndim, rows, is_free) for x in first]
    return specs + specs[:num_storage]


def on_every_device(
    fn: Callable[[Any], Callable[..., list[Any]]], operands: Sequence[Any], exchange: Exchange
) -> list[Any]:
    """Calls `fn(mesh)` with all axes manual, on any view of the fields and one device's rows.

    Results are sharded like the first arrays. Arrays are gathered over automatic axes, which types
    do not show. Called during lowering, so it is never differentiated.
    """
    num_fields, num_results = exchange.num_before_arrays, exchange.num_arrays
    fields, arrays = operands[:num_fields], operands[num_fields:]
    names, open_axes = exchange.comm.axis_names, exchange.comm.open_axes
    field_spec = P(names) if exchange.is_global else P()
    specs = _row_specs(names, arrays, open_axes, exchange.is_global, len(arrays) - num_results)
    mesh = jax.sharding.get_abstract_mesh()
    if not all(name in mesh.axis_names for name in open_axes):  # known by the types alone
        mesh = jax.typeof(arrays[0]).sharding.mesh
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        # Here and not before the call: without jit they may be on one device, next to traced
        # arrays.
        fields = [retype(x, mesh, field_spec) for x in fields]
    in_specs = (*(field_spec for _ in fields), *specs)
    mapped = with_manual_axes(
        fn(mesh), open_axes, mesh, in_specs=in_specs, out_specs=specs[:num_results]
    )
    return mapped(*fields, *arrays)


def vary_with(fields: Iterable[Any], names: Sequence[str], arrays: list[Any]) -> list[Any]:
    """The arrays, made to vary over every mesh axis that the result depends on.

    These are the axes over which one of the fields varies, and those of the ranks.
    """
    axes = frozenset().union(*map(varying_axes, fields))
    if not all(axes.union(varying_axes(x)).issuperset(names) for x in arrays):
        for name in names:  # varying_axes is empty where JAX does not track it (check_vma=False)
            axes |= varying_axes(jax.lax.axis_index(name))
    return arrays if all(varying_axes(x) == axes for x in arrays) else vary_alike(arrays, also=axes)


def lower_partitioned(primitive, ctx, *operands, exchange: Exchange, on_one_device):
    """Lowers a global exchange; `on_one_device` is used if there is nothing to split."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):  # XLA would abort the process
        raise NotImplementedError(
            f"{exchange.op}: arrays of all ranks are split by a Shardy rule, but "
            "jax_use_shardy_partitioner is False. Enable it, or call inside jax.shard_map."
        )
    avals = read_operands(ctx.avals_in, exchange)
    names, num_ranks = exchange.comm.axis_names, exchange.comm.num_ranks

    mesh_around = jax.sharding.get_mesh()

    def partition(mesh, arguments, results):
        mesh = program_mesh(exchange.op, names, mesh, mesh_around)
        _check_num_ranks(exchange, mesh)
        given = read_operands(arguments, exchange)
        is_free = lambda axis: axis not in names
        row_specs = [row_spec(x.sharding, len(x.shape), names, is_free) for x in given.arrays]
        fields = [P(names)] * exchange.num_before_arrays
        specs = [*fields, *row_specs, *row_specs[: len(given.storage)]]

        def on_each_device(*moved):
            return primitive.bind(*moved, exchange=exchange.inside(mesh))

        on_mesh = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        return mesh, on_each_device, on_mesh(row_specs), tuple(on_mesh(specs))

    result_rows = [out.shape[0] // num_ranks for out in ctx.avals_out]
    rule, whole, sizes = _sharding_rule(avals, result_rows, num_ranks)
    run = partitioned(
        on_one_device,
        partition,
        name=(str(primitive), exchange, mesh_around),
        on_tpus=functools.partial(_run_over_ranks, primitive, exchange=exchange),
        sharding_rule=rule,
        need_replication_factors=whole,
        **sizes,
    )
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _run_over_ranks(primitive, *operands, exchange: Exchange):
    """Runs the same in a `shard_map` over the ranks' axes, for XLA's compilers without such rules.

    The other axes stay automatic. XLA gathers over them what `ragged_all_to_all` moves.
    """
    mesh, names = exchange.mesh, exchange.comm.axis_names
    if mesh is None:
        raise NotImplementedError(
            f"{exchange.op}: on TPUs, arrays of all ranks need a mesh that is known before the "
            "program is compiled. Pass mesh=, or call under jax.set_mesh or inside jax.shard_map."
        )
    _check_num_ranks(exchange, mesh)
    run = lambda *moved: primitive.bind(*moved, exchange=exchange.inside(mesh))
    return with_manual_axes(run, names, mesh, in_specs=P(names), out_specs=P(names))(*operands)


def _check_num_ranks(exchange: Exchange, mesh) -> None:
    comm = exchange.comm
    num_devices = int(np.prod([mesh.shape[name] for name in comm.axis_names]))
    if num_devices != comm.num_ranks:
        raise ValueError(
            f"{exchange.op}: metadata is for world_size={comm.num_ranks} but axis "
            f"{','.join(comm.axis_names)!r} has {num_devices} devices. Plan with "
            f"world_size={num_devices}."
        )


def _sharding_rule(avals: ExchangeOperands, result_rows: list[int], num_ranks: int):
    """Returns the rule as text, the factors that are not sharded, and the sizes of row factors.

    "w m0, ... (w t0) f0 f1 -> (w c0) f0 f1": w is the factor of the ranks, t and c are the rows of
    one rank before and after.
    """
    whole: list[str] = []  # by first appearance
    sizes: dict[str, int] = {}
    counter = itertools.count()

    def new_whole(prefix: str) -> str:
        whole.append(f"{prefix}{next(counter)}")
        return whole[-1]

    def rows(prefix: str, num_rows: int) -> str:
        if num_rows == 1:  # a factor of size 1 must be separate
            return "w"
        factor = new_whole(prefix)
        if num_ranks == 1:
            return factor
        sizes[factor] = num_rows
        return f"(w {factor})"

    def dims(rows: list[str]) -> list[str]:
        return [" ".join([row, *f]) for row, f in zip(rows, features, strict=True)]

    fields = [field for metadata in avals.metadata for field in metadata.present()]
    operands = [" ".join(["w", *(new_whole("m") for _ in x.shape[1:])]) for x in fields]
    features = [[f"f{next(counter)}" for _ in x.shape[1:]] for x in avals.arrays]
    operands += dims([rows("t", x.shape[0] // num_ranks) for x in avals.arrays])
    results = dims([rows("c", num_rows) for num_rows in result_rows])
    operands += results[: len(avals.storage)]
    return f"{', '.join(operands)} -> {', '.join(results)}", tuple(whole), sizes


register_lowering(Operation.EXCHANGE, lower_on_cpu, on=ON_CPU)
register_lowering(Operation.EXCHANGE, lower_on_gpu, on=ON_GPU)
register_lowering(Operation.EXCHANGE, xla.lower, on=[XLA])
register_lowering(Operation.EXCHANGE_ON_ONE_DEVICE, on_one_gpu, on=ON_GPU)
register_lowering(Operation.EXCHANGE_ON_ONE_DEVICE, xla.on_one_device, on=[XLA])


def lower(primitive: Primitive, ctx: Any, *operands: Any, exchange: Exchange) -> Any:
    """Lowers both primitives."""
    op, comm = exchange.op, exchange.comm
    on_cpu = "cpu" in ctx.module_context.platforms
    if exchange.by_collectives is not None and comm.implementation is None and not on_cpu:
        return xla.lower(ctx, *operands, exchange=exchange)
    if comm.open_axes:
        opened = functools.partial(_opened, primitive, exchange=exchange)
        return lower_opened(opened, ctx, *operands)
    if exchange.is_global:
        implementation = choose_on_one_device(
            op, comm.implementation, ctx.module_context.platforms, comm.num_ranks
        )
        if implementation in ON_GPU and (missing := what_gpus_lack(exchange)):
            implementation = fall_back_to_xla(op, comm.implementation, missing)
        on_one_device = implementation.lowerings[Operation.EXCHANGE_ON_ONE_DEVICE]
        return lower_partitioned(
            primitive, ctx, *operands, exchange=exchange, on_one_device=on_one_device(ctx, exchange)
        )
    choice = choose(ctx, op, comm)
    if choice.implementation in ON_GPU and (missing := what_gpus_lack(exchange)):
        choice = fall_back(choice, op, comm, missing)
    return choice.lower(Operation.EXCHANGE, ctx, *operands, exchange=exchange)


def _opened(primitive: Primitive, *operands: Any, exchange: Exchange) -> Any:
    """Runs each device's part inside a `shard_map` over the axes that are not manual yet."""

    def on_rank(mesh):
        local = exchange.inside(mesh)
        return lambda *moved: primitive.bind(*moved, exchange=local)

    return on_every_device(on_rank, operands, exchange)
