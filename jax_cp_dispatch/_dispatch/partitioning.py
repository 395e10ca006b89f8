"""Calls on arrays of all ranks under plain `jit`: a Shardy rule, and one device's part.

Rows are sharded over the axis of the ranks. Every other dimension keeps its sharding, so heads stay
on their tensor-parallel devices. Each index of the other mesh axes is an independent group of
ranks.
"""

import itertools
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch.devices import row_spec
from jax_cp_dispatch._dispatch.exchange_operands import Exchange, ExchangeOperands, read_operands
from jax_cp_dispatch._ranks.call_context import with_manual_axes
from jax_cp_dispatch._ranks.partitioning import named, program_mesh


def lower_partitioned(primitive, ctx, *operands, exchange: Exchange, on_one_device):
    """Lowers a global exchange; `on_one_device` is used if there is nothing to split."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):  # XLA would abort the process
        raise NotImplementedError(
            f"{exchange.op}: arrays of all ranks are split by a Shardy rule, but "
            "jax_use_shardy_partitioner is False. Enable it, or call inside jax.shard_map."
        )
    avals = read_operands(ctx.avals_in, exchange)
    names, num_ranks = exchange.comm.axis_names, exchange.comm.num_ranks

    @custom_partitioning
    def everywhere(*moved):
        return on_one_device(*moved)

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
    factors: dict[str, Any] = {"need_replication_factors": whole, **sizes}
    everywhere.def_partition(partition=partition, sharding_rule=rule, **factors)

    run = named(everywhere, (str(primitive), exchange))
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def run_over_ranks(primitive, *operands, exchange: Exchange):
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
