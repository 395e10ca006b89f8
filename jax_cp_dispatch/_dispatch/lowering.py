"""Lowers an exchange: opens its axes, splits arrays of all ranks, and chooses an implementation.

No side effect is declared: all devices of a program run one executable, so a call is removed,
merged or hoisted on all of them alike.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.interpreters.mlir import ir
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch import xla
from jax_cp_dispatch._dispatch.arguments import Exchange
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import axes_of, call_site, rank_index
from jax_cp_dispatch._ranks.gpu import all_ranks_here, what_pointers_lack, why_slab_is_full
from jax_cp_dispatch._ranks.implementations import (
    NCCL_WINDOW,
    NVSHMEM,
    ON_CPU,
    ON_GPU,
    XLA,
    Operation,
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
)
from jax_cp_dispatch._ranks.options import (
    CallContext,
    place,
    retype,
    with_manual_axes,
)

# ---- The custom call of an exchange: what CPUs and GPUs read alike, and its lowering for each.


_MAX_ARRAYS = 64  # of one call on GPUs, as in csrc/kernels/call.h
_ALL = 0  # multiprocessors, for the handler
_MOST_SMS = 2**31 - 1  # of any GPU
_OF_GROUPS = "has_fingerprint", "num_arrays", "num_tokens", "capacity", "buffer"


def _custom_call(
    ctx: Any, exchange: Exchange, choice: Chosen | None, *, is_start: bool = False
) -> Callable[..., list[Any]]:
    """Returns the call of a whole exchange, or of its start, to be traced.

    Its operands are the rank and the group (0 if one device holds all ranks), and those of the
    primitive. Results are written to the storage; a start returns its arrays in their memory.
    Without a choice one device, a GPU, holds all rows.
    """
    groups, comm = exchange.groups, exchange.comm
    of_groups = {name: [getattr(group, name) for group in groups] for name in _OF_GROUPS}
    for name in "src_offset", "weights":
        of_groups[f"has_{name}"] = [name in group.fields for group in groups]
    # The groups have properties that shapes do not show.
    rows = "; ".join(f"{x.num_tokens} tokens, capacity {x.capacity}" for x in groups)
    what = f"{'dispatch' if exchange.sums is None else 'combine'} of {rows}"
    if choice is None:
        ranks = all_ranks_here()
    else:
        ranks = choice.implementation.rank_attributes(ctx, comm, choice.groups, what)
    attributes = {
        "op": exchange.op,
        "capacity_names": ",".join(group.capacity_name for group in groups),
        **{name: np.array(values, np.int64) for name, values in of_groups.items()},
        **comm.attributes(),
        **ranks,
    }
    if choice is None or choice.implementation.platform == "cuda":
        attributes["num_comm_sm"] = np.int64(min(exchange.num_comm_sm or _ALL, _MOST_SMS))
    target = runtime.DISPATCH_TARGET if exchange.sums is None else runtime.COMBINE_TARGET
    if choice is not None and choice.implementation is NCCL_WINDOW:
        target += "_window"

    def call(*operands: Any) -> list[Any]:
        fields, arrays, further = exchange.split(operands)
        axes = ((), ()) if exchange.is_global else (comm.axis_names, comm.group_axes)
        given, n, avals_out = [*map(rank_index, axes), *fields, *arrays], len(arrays), ctx.avals_out
        if is_start:
            avals_out = avals_out[: 2 * n + 1]
            aliases = {len(given) - n + i: n + i for i in range(n)}
        else:
            aliases = {len(given) + i: i for i in range(len(further))}
            given += further
        handler = jax.ffi.ffi_call(
            f"{target}_start" if is_start else target,
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals_out],
            input_output_aliases=aliases,
            has_side_effect=is_start,  # two calls of the same exchange must not become one
        )
        return list(handler(*given, **attributes))

    return call


def _lower_by_call(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen) -> Any:
    """Lowers the part of one rank between CPU devices, or between GPUs."""
    if choice.implementation in ON_CPU:
        prepare_cpu_devices()
    call = _custom_call(ctx, exchange, choice)
    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _what_gpus_lack(
    ctx: Any, exchange: Exchange, choice: Chosen, sent: Sequence[Any]
) -> str | None:
    """Returns why an exchange between GPUs needs XLA; None if it does not.

    `sent` are the avals of the arrays whose rows move.
    """
    if any("weights" in group.fields for group in exchange.groups):
        return "rows have weights"
    if exchange.num_arrays > _MAX_ARRAYS:
        return f"{exchange.num_arrays} arrays, but a call on GPUs takes at most {_MAX_ARRAYS}"
    if choice.implementation is not NVSHMEM:
        return None  # channels of the others take more memory when they need it
    network = what_pointers_lack(ctx, exchange.comm, choice.groups) is not None
    key, num_bytes = channel_of(exchange, ctx.avals_in, sent, network)
    return why_slab_is_full(ctx.module_context, repr((key, choice.groups)), num_bytes)


def channel_of(
    exchange: Exchange, avals: Sequence[Any], sent: Sequence[Any], network: bool
) -> tuple[str, int]:
    """Returns what the channel of a call between GPUs depends on, and its bytes per rank.

    `network`: some ranks reach each other only over one.
    """
    fields, groups, of_channel = iter(exchange.split(avals)[0]), [], []
    for group, arrays in zip(exchange.groups, exchange.by_group(sent), strict=True):
        shapes = {name: x.shape for name, x in zip(group.fields, fields, strict=False)}
        num_slots, num_replicas = shapes["dst_rank"][-2:]
        rows = [math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays]
        has_offset = "src_offset" in shapes
        groups.append((group.num_tokens, group.capacity, num_replicas, has_offset, rows))
        of_channel.append((num_slots, group.buffer))
    sizes = exchange.sums is None, network, exchange.comm.num_ranks, groups
    return repr((sizes, of_channel)), runtime.native.channel_bytes(*sizes)


# ---- An exchange in two calls on GPUs; elsewhere it is whole at its start.


def lower_start(ctx: Any, *operands: Any, exchange: Exchange, num_held: int) -> Any:
    """Lowers the first call.

    It puts the exchange on a stream of the package and returns; the second call makes the program's
    stream wait. XLA keeps the memory that the exchange uses, because the second call takes all
    results of the first; and it puts the work between them, because optimization barriers make the
    work depend on `held`, and the second call on both.
    """
    choice = _choice_of_pair(ctx, exchange, exchange.split(ctx.avals_in)[1])
    if choice is None:

        def whole(*operands: Any) -> list[Any]:
            fields, arrays, beside = exchange.split(operands)
            moved = exchange.primitive.bind(*fields, *arrays, exchange=exchange)
            return [*moved, *arrays, jnp.zeros(num_held, jnp.float32), *beside]

        return lower_opened(whole, ctx, *operands)
    call = _custom_call(ctx, exchange, None if exchange.is_global else choice, is_start=True)

    def start(*operands: Any) -> list[Any]:
        *outs, held = call(*operands)
        return [*outs, *_one_after_another(held, exchange.split(operands)[2])]

    return mlir.lower_fun(start, multiple_results=True)(ctx, *operands)


def lower_done(ctx: Any, *operands: Any, exchange: Exchange) -> Any:
    """Lowers the second call; nothing is left to do after a whole exchange.

    A first call in another loop, branch or function is the whole exchange, because the runtime
    finds no second call for it.
    """
    n, num_fields = exchange.num_arrays, len(exchange.split(operands)[0])
    operands, avals = operands[num_fields:], ctx.avals_in[num_fields:]
    is_whole = _choice_of_pair(ctx, exchange, avals[n : 2 * n]) is None
    if is_whole or not all(map(_is_result_here, operands[: 2 * n])):
        return [*operands[:n], *operands[2 * n + 1 :]]

    def done(*operands: Any) -> list[Any]:
        held, *beside = _one_after_another(operands[2 * n], operands[2 * n + 1 :])
        call = jax.ffi.ffi_call(
            runtime.EXCHANGE_DONE_TARGET,
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:n]],
            input_output_aliases={i: i for i in range(n)},
            has_side_effect=True,  # it stays where it is
        )
        return [*call(*operands[: 2 * n], held), *beside]

    ctx = ctx.replace(avals_in=avals)
    return mlir.lower_fun(done, multiple_results=True)(ctx, *operands)


def _is_result_here(value: Any) -> bool:
    """Whether a value is the result of a custom call in the block that is being lowered."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):  # an argument
        return False
    current: Any = ir.InsertionPoint.current
    return owner.name == "stablehlo.custom_call" and owner.operation.block == current.block


def _choice_of_pair(ctx: Any, exchange: Exchange, sent: Sequence[Any]) -> Chosen | None:
    """Returns the implementation, if it has two calls for this program."""
    program = ctx.module_context.axis_context
    if exchange.comm.open_axes or (exchange.is_global and program.num_devices != 1):
        return None  # the arrays of other devices are here too, until the program is partitioned
    choice = choose(ctx, exchange.op, exchange.comm, on_one_device=exchange.is_global)
    if choice.implementation not in ON_GPU or _what_gpus_lack(ctx, exchange, choice, sent):
        return None  # the whole exchange says what is missing
    return choice


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
    return P(rows, *(tuple(filter(is_free, axes_of(entry))) or None for entry in spec[1:num_dims]))


def _row_specs(names, arrays, open_axes, is_global, num_storage) -> list[P]:
    """Returns how arrays are split over the axes that our `shard_map` makes manual."""
    is_free = lambda axis: axis in open_axes and axis not in names
    rows = names if is_global else None
    first = arrays[: len(arrays) - num_storage]
    specs = [row_spec(jax.typeof(x).sharding, x.ndim, rows, is_free) for x in first]
    return specs + specs[:num_storage]


def _on_every_device(*operands: Any, exchange: Exchange) -> list[Any]:
    """Makes each device's part of an exchange, with all axes manual, from any view of the fields.

    Results are sharded like the first arrays. Arrays are gathered over automatic axes, which types
    do not show. Called during lowering, so it is never differentiated.
    """
    fields, arrays, storage = exchange.split(operands)
    names, open_axes = exchange.comm.axis_names, exchange.comm.open_axes
    field_spec = P(names) if exchange.is_global else P()
    moved = [*arrays, *storage]
    specs = _row_specs(names, moved, open_axes, exchange.is_global, len(storage))
    mesh = jax.sharding.get_abstract_mesh()
    if not all(name in mesh.axis_names for name in open_axes):  # known by the types alone
        mesh = jax.typeof(arrays[0]).sharding.mesh
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        # Here and not before the call: without jit they may be on one device, next to traced
        # arrays.
        fields = [retype(x, mesh, field_spec) for x in fields]
    in_specs, out_specs = (*(field_spec for _ in fields), *specs), specs[: len(arrays)]
    run = with_manual_axes(
        exchange.inside(mesh), open_axes, mesh, in_specs=in_specs, out_specs=out_specs
    )
    return run(*fields, *moved)


def _lower_partitioned(ctx, *operands, exchange: Exchange, on_one_device):
    """Lowers a global exchange; `on_one_device` is used if there is nothing to split."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):  # XLA would abort the process
        raise NotImplementedError(
            f"{exchange.op}: arrays of all ranks are split by a Shardy rule, but "
            "jax_use_shardy_partitioner is False. Enable it, or call inside jax.shard_map."
        )
    # The part of one device is a program of its own, whose numbers all begin at one.
    site = call_site(ctx, exchange.comm)
    exchange = exchange._replace(comm=dataclasses.replace(exchange.comm, site=site))
    names, mesh_around = exchange.comm.axis_names, jax.sharding.get_mesh()

    def partition(mesh, arguments, results):
        mesh = program_mesh(exchange.op, names, mesh, mesh_around)
        fields, arrays, storage = exchange.split(arguments)
        is_free = lambda axis: axis not in names
        row_specs = [row_spec(x.sharding, len(x.shape), names, is_free) for x in arrays]
        specs = [*[P(names)] * len(fields), *row_specs, *row_specs[: len(storage)]]
        on_mesh = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        return mesh, exchange.inside(mesh), on_mesh(row_specs), tuple(on_mesh(specs))

    rule, whole, sizes = _sharding_rule(exchange, ctx.avals_in, ctx.avals_out)
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
    run = exchange.inside(mesh)
    return with_manual_axes(run, names, mesh, in_specs=P(names), out_specs=P(names))(*operands)


def _sharding_rule(exchange: Exchange, avals_in: Sequence[Any], avals_out: Sequence[Any]):
    """Returns the rule as text, the factors that are not sharded, and the sizes of row factors.

    "w m0, ... (w t0) f0 f1 -> (w c0) f0 f1": w is the factor of the ranks, t and c are the rows of
    one rank before and after.
    """
    fields, arrays, storage = exchange.split(avals_in)
    num_ranks = exchange.comm.num_ranks
    whole: list[str] = []  # by first appearance
    sizes: dict[str, int] = {}
    counter = itertools.count()

    def new_whole(prefix: str) -> str:
        whole.append(f"{prefix}{next(counter)}")
        return whole[-1]

    def dims(prefix: str, arrays: Sequence[Any]) -> list[str]:
        found = []
        for x, of_features in zip(arrays, features, strict=True):
            num_rows, row = x.shape[0] // num_ranks, "w"
            if num_rows > 1:  # a factor of size 1 must be separate
                row = new_whole(prefix)
                if num_ranks > 1:
                    sizes[row] = num_rows
                    row = f"(w {row})"
            found.append(" ".join([row, *of_features]))
        return found

    operands = [" ".join(["w", *(new_whole("m") for _ in x.shape[1:])]) for x in fields]
    features = [[f"f{next(counter)}" for _ in x.shape[1:]] for x in arrays]
    operands += dims("t", arrays)
    results = dims("c", avals_out)
    operands += results[: len(storage)]
    return f"{', '.join(operands)} -> {', '.join(results)}", tuple(whole), sizes


register_lowering(Operation.EXCHANGE, _lower_by_call, on=[*ON_CPU, *ON_GPU, NCCL_WINDOW])
register_lowering(Operation.EXCHANGE, xla.lower_by_xla, on=[XLA])


def lower(ctx: Any, *operands: Any, exchange: Exchange) -> Any:
    comm = exchange.comm
    by_xla = comm.implementation == XLA.name
    if comm.implementation is None:
        by_xla = "cpu" not in ctx.module_context.platforms
    if exchange.by_collectives is not None and by_xla:  # these need no axes opened
        return xla.lower_by_xla(ctx, *operands, exchange=exchange)
    if comm.open_axes:
        opened = functools.partial(_on_every_device, exchange=exchange)
        return lower_opened(opened, ctx, *operands)
    choice = choose(ctx, exchange.op, exchange.comm, on_one_device=exchange.is_global)
    if choice.implementation.platform == "cuda":
        sent = exchange.split(ctx.avals_in)[1]
        if missing := _what_gpus_lack(ctx, exchange, choice, sent):
            choice = fall_back(choice, exchange.op, comm, missing)
    if exchange.is_global:
        here = functools.partial(xla.move_by_xla, exchange, False)
        if choice.implementation.platform == "cuda":
            here = _custom_call(ctx, exchange, None)
        return _lower_partitioned(ctx, *operands, exchange=exchange, on_one_device=here)
    rule = choice.implementation.lowerings[Operation.EXCHANGE]
    return rule(ctx, *operands, exchange=exchange, choice=choice)
