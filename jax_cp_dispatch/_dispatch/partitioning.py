"""Calls on the arrays of all ranks, under plain `jit`: a Shardy rule, and one device's part of it.

Rows are split over the axis of the ranks; every other dimension keeps the sharding that it has, so
that heads stay on their tensor-parallel devices. Each place on the other mesh axes is an
independent group of ranks.
"""

import itertools
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch.operands import Call, Operands, num_before_arrays, read_operands
from jax_cp_dispatch._ranks.placement import row_spec


def lower_partitioned(primitive, ctx, *operands, call: Call, parts, on_one_device, params):
    """Lowers a global call; `on_one_device` is the whole of it where there is nothing to split."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):  # XLA would end the process
        raise NotImplementedError(
            f"{call.op}: arrays of all ranks are split by a Shardy rule, but "
            "jax_use_shardy_partitioner is False. Leave it on, or call inside jax.shard_map."
        )
    avals = read_operands(ctx.avals_in, parts)
    names = call.axis_names

    @custom_partitioning
    def everywhere(*moved):
        return on_one_device(*moved)

    mesh_around = jax.sharding.get_mesh()

    def partition(mesh, arguments, results):
        if mesh.empty:  # custom_partitioning does not ask jax.set_mesh
            mesh = mesh_around
        _check_mesh(call.op, mesh, call)
        given = read_operands(arguments, parts)
        is_free = lambda axis: axis not in names
        row_specs = [row_spec(x.sharding, len(x.shape), names, is_free) for x in given.arrays]
        fields = [P(names)] * num_before_arrays(parts)
        specs = [*fields, *row_specs, *row_specs[: len(given.storage)]]

        def on_each_device(*moved):
            return primitive.bind(*moved, call=call.on_one_rank(mesh), parts=parts, **params)

        place = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        return mesh, on_each_device, place(row_specs), tuple(place(specs))

    result_rows = [out.shape[0] // call.num_ranks for out in ctx.avals_out]
    rule, whole, sizes = _sharding_rule(avals, result_rows, call.num_ranks)
    factors: dict[str, Any] = {"need_replication_factors": whole, **sizes}
    everywhere.def_partition(partition=partition, sharding_rule=rule, **factors)

    def named(*moved):
        # The program names only the address of `partition`, which a persistent compilation cache
        # may ignore, and which another process may use for another call.
        with set_xla_metadata(jax_cp_dispatch=repr((str(primitive), call, parts, params))):
            return everywhere(*moved)

    return mlir.lower_fun(named, multiple_results=True)(ctx, *operands)


def _check_mesh(op: str, mesh, call: Call) -> None:
    axis = ",".join(call.axis_names)
    missing = [name for name in call.axis_names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{op}: axis_name {missing[0]!r} is not an axis of the mesh on which this program "
            f"runs, {dict(mesh.shape)}. Name the axis whose devices are the ranks."
        )
    num_devices = int(np.prod([mesh.shape[name] for name in call.axis_names]))
    if num_devices != call.num_ranks:
        raise ValueError(
            f"{op}: metadata is for world_size={call.num_ranks} but axis {axis!r} has "
            f"{num_devices} devices. Plan with world_size={num_devices}."
        )


def _sharding_rule(avals: Operands, result_rows: list[int], num_ranks: int):
    """The rule as text, the factors that every device has whole, and the sizes of those in rows.

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
        if num_rows == 1:  # a factor of size 1 must stand alone
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
