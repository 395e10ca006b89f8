"""Lowers an exchange: opens its axes, splits arrays of all ranks, and chooses an implementation.

No side effect is declared: all devices of a program run one executable, so a call is removed,
merged or hoisted on all of them alike.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.interpreters.mlir import ir
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch import xla
from jax_cp_dispatch._dispatch.arguments import Exchange, ExchangeOperands, check_world_size
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.gpu import all_ranks_here
from jax_cp_dispatch._ranks.implementations import (
    ON_CPU,
    ON_GPU,
    XLA,
    Operation,
    choose_on_one_device,
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


def _handler_name(exchange: Exchange) -> str:
    return runtime.DISPATCH_TARGET if exchange.sums is None else runtime.COMBINE_TARGET


def _call_handler(
    avals_out: Any, exchange: Exchange, attributes: dict[str, Any], *operands: Any
) -> list[Any]:
    """Makes the call. The handler's operands are rank and group, and those of the primitive."""
    rank_and_group = _rank_and_group(exchange)
    num_results = exchange.num_arrays
    first = exchange.num_before_arrays + num_results  # of the storage
    aliases = {len(rank_and_group) + i: i - first for i in range(first, len(operands))}
    handler = jax.ffi.ffi_call(
        _handler_name(exchange), _like(avals_out), input_output_aliases=aliases
    )
    return list(handler(*rank_and_group, *operands, **_attributes(exchange), **attributes))


def _rank_and_group(exchange: Exchange) -> list[Any]:
    """Returns those of the device; 0 if one device holds all ranks."""
    return rank_and_group(Communicator() if exchange.is_global else exchange.comm)


def _attributes(exchange: Exchange) -> dict[str, Any]:
    """Returns what a handler reads besides the attributes of the ranks."""
    spans = ("has_src_offset", "has_weights", "has_fingerprint", "num_arrays", "num_tokens")
    span_of = lambda name: np.array([getattr(x, name) for x in exchange.groups], np.int64)
    return {
        "op": exchange.op,
        "capacity_names": ",".join(group.capacity_name for group in exchange.groups),
        **{name: span_of(name) for name in (*spans, "capacity", "buffer")},
    }


def _like(avals: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes alone."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def _lower_on_cpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank between CPU devices."""
    prepare_cpu_devices()
    # With the properties of the groups that shapes do not show.
    rows = "; ".join(f"{x.num_tokens} tokens, capacity {x.capacity}" for x in exchange.groups)
    what = f"{_handler_name(exchange).rpartition('.')[2]} of {rows}"
    ranks = exchange.comm.attributes() | choice.rank_attributes(ctx, exchange.comm, what)
    call = functools.partial(_call_handler, ctx.avals_out, exchange, ranks)
    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


_MAX_ARRAYS = 64  # of one call, as in csrc/kernels/call.h
_ALL = 0  # multiprocessors, for the handler
_MOST_SMS = 2**31 - 1  # of any GPU


def _what_gpus_lack(exchange: Exchange) -> str | None:
    """Returns why an exchange needs XLA, whatever the transport; None if it does not."""
    if any(group.has_weights for group in exchange.groups):
        return "rows have weights"
    if exchange.num_arrays <= _MAX_ARRAYS:
        return None
    return f"{exchange.num_arrays} arrays, but a call on GPUs takes at most {_MAX_ARRAYS}"


def _on_gpu(ctx: Any, exchange: Exchange, choice: Chosen | None) -> dict[str, Any]:
    """Returns the attributes of the ranks; without a choice one device holds their rows."""
    ranks = choice.rank_attributes(ctx, exchange.comm, "") if choice else all_ranks_here()
    num_comm_sm = np.int64(min(exchange.num_comm_sm or _ALL, _MOST_SMS))
    return {**exchange.comm.attributes(), **ranks, "num_comm_sm": num_comm_sm}


def _lower_on_gpu(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank."""
    ranks = _on_gpu(ctx, exchange, choice)
    move = functools.partial(_call_handler, ctx.avals_out, exchange, ranks)
    return mlir.lower_fun(move, multiple_results=True)(ctx, *operands)


# ---- An exchange in two calls on GPUs; elsewhere it is whole at its start.


def lower_start(ctx: Any, *operands: Any, exchange: Exchange, num_held: int) -> Any:
    """Lowers the first call.

    It puts the exchange on a stream of the package and returns; the second call makes the program's
    stream wait. XLA keeps the memory that the exchange uses, because the second call takes all
    results of the first; and it puts the work between them, because optimization barriers make the
    work depend on `held`, and the second call on both.
    """
    choice = _choice_of_pair(ctx, exchange)
    n = exchange.num_before_arrays
    end = n + exchange.num_arrays
    if choice is None:

        def whole(*operands: Any) -> list[Any]:
            moved = exchange.primitive.bind(*operands[:end], exchange=exchange)
            return [*moved, *operands[n:end], jnp.zeros(num_held, jnp.float32), *operands[end:]]

        return lower_opened(whole, ctx, *operands)
    ranks = _on_gpu(ctx, exchange, None if exchange.is_global else choice)

    def start(*operands: Any) -> list[Any]:
        rank_and_group = _rank_and_group(exchange)
        call = jax.ffi.ffi_call(
            f"{_handler_name(exchange)}_start",
            _like(ctx.avals_out[: 2 * exchange.num_arrays + 1]),
            input_output_aliases={len(rank_and_group) + i: end - 2 * n + i for i in range(n, end)},
            has_side_effect=True,  # two calls of the same exchange must not become one
        )
        outs = call(*rank_and_group, *operands[:end], **_attributes(exchange), **ranks)
        return [*outs[:-1], *_one_after_another(outs[-1], operands[end:])]

    return mlir.lower_fun(start, multiple_results=True)(ctx, *operands)


def lower_done(ctx: Any, *operands: Any, exchange: Exchange) -> Any:
    """Lowers the second call; nothing is left to do after a whole exchange.

    A first call in another loop, branch or function is the whole exchange, because the runtime
    finds no second call for it.
    """
    n, operands = exchange.num_arrays, operands[exchange.num_before_arrays :]
    is_whole = _choice_of_pair(ctx, exchange) is None
    if is_whole or not all(map(_is_result_here, operands[: 2 * n])):
        return [*operands[:n], *operands[2 * n + 1 :]]

    def done(*operands: Any) -> list[Any]:
        held, *beside = _one_after_another(operands[2 * n], operands[2 * n + 1 :])
        call = jax.ffi.ffi_call(
            runtime.EXCHANGE_DONE_TARGET,
            _like(operands[:n]),
            input_output_aliases={i: i for i in range(n)},
            has_side_effect=True,  # it stays where it is
        )
        return [*call(*operands[: 2 * n], held), *beside]

    avals_in = ctx.avals_in[exchange.num_before_arrays :]
    return mlir.lower_fun(done, multiple_results=True)(ctx.replace(avals_in=avals_in), *operands)


def _is_result_here(value: Any) -> bool:
    """Whether a value is the result of a custom call in the block that is being lowered."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):  # an argument
        return False
    current: Any = ir.InsertionPoint.current
    return owner.name == "stablehlo.custom_call" and owner.operation.block == current.block


def _choice_of_pair(ctx: Any, exchange: Exchange) -> Chosen | None:
    """Returns the implementation, if it has two calls for this program."""
    program = ctx.module_context.axis_context
    if exchange.comm.open_axes or (exchange.is_global and program.num_devices != 1):
        return None  # the arrays of other devices are here too, until the program is partitioned
    if _what_gpus_lack(exchange):
        return None  # the whole exchange says so
    choice = _choice(ctx, exchange)
    return choice if choice.implementation in ON_GPU else None


def _one_after_another(held: Any, beside: Sequence[Any]) -> list[Any]:
    """Returns all values; whatever reads one of them depends on all."""
    return list(jax.lax.optimization_barrier((held, *beside))) if beside else [held]


# ---- Calls on arrays of all ranks: a Shardy rule, and each device's part.
#
# Rows are sharded over the axis of the ranks. Every other dimension keeps its sharding, so heads
# stay on their tensor-parallel devices. Each index of the other mesh axes is an independent group
# of ranks.


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


def _on_every_device(
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


def _lower_partitioned(ctx, *operands, exchange: Exchange, on_one_device):
    """Lowers a global exchange; `on_one_device` is used if there is nothing to split."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):  # XLA would abort the process
        raise NotImplementedError(
            f"{exchange.op}: arrays of all ranks are split by a Shardy rule, but "
            "jax_use_shardy_partitioner is False. Enable it, or call inside jax.shard_map."
        )
    avals = ExchangeOperands.split(ctx.avals_in, exchange)
    names, num_ranks = exchange.comm.axis_names, exchange.comm.num_ranks

    mesh_around = jax.sharding.get_mesh()

    def partition(mesh, arguments, results):
        mesh = program_mesh(exchange.op, names, mesh, mesh_around)
        _check_mesh(exchange, mesh)
        given = ExchangeOperands.split(arguments, exchange)
        is_free = lambda axis: axis not in names
        row_specs = [row_spec(x.sharding, len(x.shape), names, is_free) for x in given.arrays]
        fields = [P(names)] * exchange.num_before_arrays
        specs = [*fields, *row_specs, *row_specs[: len(given.storage)]]

        on_each_device = functools.partial(exchange.primitive.bind, exchange=exchange.inside(mesh))
        on_mesh = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        return mesh, on_each_device, on_mesh(row_specs), tuple(on_mesh(specs))

    result_rows = [out.shape[0] // num_ranks for out in ctx.avals_out]
    rule, whole, sizes = _sharding_rule(avals, result_rows, num_ranks)
    run = partitioned(
        on_one_device,
        partition,
        name=(exchange, mesh_around),
        on_tpus=functools.partial(_run_over_ranks, exchange=exchange),
        sharding_rule=rule,
        need_replication_factors=whole,
        **sizes,
    )
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _run_over_ranks(*operands, exchange: Exchange):
    """Runs the same in a `shard_map` over the ranks' axes, for XLA's compilers without such rules.

    The other axes stay automatic. XLA gathers over them what `ragged_all_to_all` moves.
    """
    mesh, names = exchange.mesh, exchange.comm.axis_names
    if mesh is None:
        raise NotImplementedError(
            f"{exchange.op}: on TPUs, arrays of all ranks need a mesh that is known before the "
            "program is compiled. Pass mesh=, or call under jax.set_mesh or inside jax.shard_map."
        )
    _check_mesh(exchange, mesh)
    run = functools.partial(exchange.primitive.bind, exchange=exchange.inside(mesh))
    return with_manual_axes(run, names, mesh, in_specs=P(names), out_specs=P(names))(*operands)


def _check_mesh(exchange: Exchange, mesh) -> None:
    comm = exchange.comm
    num_devices = math.prod(mesh.shape[name] for name in comm.axis_names)
    check_world_size(exchange.op, comm.num_ranks, comm.axis_names, num_devices)


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


register_lowering(Operation.EXCHANGE, _lower_on_cpu, on=ON_CPU)
register_lowering(Operation.EXCHANGE, _lower_on_gpu, on=ON_GPU)
register_lowering(Operation.EXCHANGE, xla.lower, on=[XLA])


def lower(ctx: Any, *operands: Any, exchange: Exchange) -> Any:
    """Lowers an exchange in one call."""
    comm = exchange.comm
    by_xla = comm.implementation == XLA.name
    if comm.implementation is None:
        by_xla = "cpu" not in ctx.module_context.platforms
    if exchange.by_collectives is not None and by_xla:  # these need no axes opened
        return xla.lower(ctx, *operands, exchange=exchange)
    if comm.open_axes:
        # Each device's part, inside a `shard_map` over the axes that are not manual yet.
        def on_rank(mesh):
            return functools.partial(exchange.primitive.bind, exchange=exchange.inside(mesh))

        opened = lambda *moved: _on_every_device(on_rank, moved, exchange)
        return lower_opened(opened, ctx, *operands)
    choice = _choice(ctx, exchange)
    if choice.implementation in ON_GPU and (missing := _what_gpus_lack(exchange)):
        choice = fall_back(choice, exchange.op, comm, missing)
    if exchange.is_global:
        here = xla.on_one_device(exchange)
        if choice.implementation in ON_GPU:
            ranks = _on_gpu(ctx, exchange, None)
            here = functools.partial(_call_handler, ctx.avals_out, exchange, ranks)
        return _lower_partitioned(ctx, *operands, exchange=exchange, on_one_device=here)
    return choice.lower(Operation.EXCHANGE, ctx, *operands, exchange=exchange)


def _choice(ctx: Any, exchange: Exchange) -> Chosen:
    """Returns the implementation; of a global call, that of a device that holds all rows."""
    op, comm = exchange.op, exchange.comm
    if not exchange.is_global:
        return choose(ctx, op, comm)
    platforms = ctx.module_context.platforms
    row = choose_on_one_device(op, comm.implementation, platforms, comm.num_ranks)
    return Chosen(row, None)
