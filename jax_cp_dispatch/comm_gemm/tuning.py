"""Measured times of methods: a table that `tune` fills outside of tracing, and saves."""

import json
import os
import pathlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch.cost import CommGemmShape, comm_gemm_methods

_VARIABLE = "JAX_CP_DISPATCH_TUNING"


class TuningTable(NamedTuple):
    """Seconds of products by method.

    Attributes:
      machine: where they were measured: platform, device kind, versions.
      seconds: of each shape and label of `cost.comm_gemm_methods`.
    """

    machine: dict[str, str]
    seconds: dict[CommGemmShape, dict[str, float]]

    def save(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes it as JSON."""
        path = pathlib.Path(path)
        entries = [
            {**shape.__dict__, "seconds": seconds} for shape, seconds in self.seconds.items()
        ]
        path.write_text(json.dumps({"machine": self.machine, "entries": entries}, indent=1) + "\n")
        return path

    @staticmethod
    def load(path: str | os.PathLike) -> "TuningTable":
        """Reads what `save` wrote.

        Raises:
          ValueError: the file is no such table.
        """
        text = pathlib.Path(path).read_text()
        try:
            return _from_json(text)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"TuningTable.load: {path} is not a table that tune saved ({error!r}). Tune again."
            ) from error


def _from_json(text: str) -> TuningTable:
    content = json.loads(text)
    seconds = {}
    for entry in content["entries"]:
        times = {str(label): float(t) for label, t in entry.pop("seconds").items()}
        seconds[CommGemmShape(**entry)] = times
    return TuningTable(dict(content["machine"]), seconds)


_table: TuningTable | None = None
_is_read = False


def use_tuning(table: TuningTable | None) -> None:
    """Makes `method="auto"` of this process follow a table, or with None the cost model alone.

    Programs that have been traced already keep what was chosen then. Every process of a program has
    to use the same table.
    """
    global _table, _is_read
    _table, _is_read = table, True


def current_tuning() -> TuningTable | None:
    """The table in use: that of `use_tuning`, or the file that JAX_CP_DISPATCH_TUNING names."""
    global _table, _is_read
    if not _is_read:
        path = os.environ.get(_VARIABLE)
        _table, _is_read = TuningTable.load(path) if path else None, True
    return _table


def tune(
    shapes: Iterable[tuple[str, int, int, int]],
    *,
    mesh: Mesh,
    axis_name: str,
    dtype: Any = jnp.float32,
    repeats: int = 7,
) -> TuningTable:
    """Measures every method on the devices of a mesh; call on the host, outside of tracing.

    Methods take turns, `repeats` times; each runs twice in a row and the second run counts. The
    least of its times stands: what disturbs a run only adds. With several processes all have to
    call it, and all get what the first has measured.

    Args:
      shapes: of global products: "all_gather_matmul" or "matmul_reduce_scatter", tokens M, and K
        and N of the whole weight [K, N], of which N or K is split over the ranks.
      mesh: every device on its other axes measures, too.
      axis_name: the mesh axis of the ranks.
      dtype: of the operands.
      repeats: rounds that count, at least 1.
    Returns:
      The table, for `use_tuning` and `TuningTable.save`.
    Raises:
      ValueError: a shape does not divide among the ranks, or is of no such function.
    """
    if repeats < 1:
        raise ValueError(f"tune: repeats is {repeats}; it needs to be at least 1.")
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"tune: axis_name {axis_name!r} is not an axis of the mesh, {dict(mesh.shape)}. Name "
            "the axis of the ranks."
        )
    p, dtype = mesh.shape[axis_name], jnp.dtype(dtype)
    seconds = {}
    for op, m, k, n in shapes:
        if op not in ("all_gather_matmul", "matmul_reduce_scatter"):
            raise ValueError(
                f"tune: got a shape of {op!r}; there are all_gather_matmul and "
                "matmul_reduce_scatter."
            )
        gathers = op == "all_gather_matmul"
        if m % p or (n if gathers else k) % p:
            raise ValueError(
                f"tune: {op} of M={m}, K={k}, N={n} does not divide among {p} ranks. Round it."
            )
        shape = CommGemmShape(
            op, m, k if gathers else k // p, n // p if gathers else n, p, dtype.itemsize
        )
        seconds[shape] = _measure(shape, mesh, axis_name, dtype, repeats)
    device = mesh.devices.flat[0]
    machine = {"platform": device.platform, "device": device.device_kind, "jax": jax.__version__}
    return _of_first_process(TuningTable(machine, seconds))


def _measure(shape: CommGemmShape, mesh, axis_name, dtype, repeats) -> dict[str, float]:
    from jax_cp_dispatch.comm_gemm.matmul import all_gather_matmul, matmul_reduce_scatter

    p = shape.num_ranks
    rng = np.random.default_rng(0)
    place = lambda spec, *size: jax.device_put(
        jnp.asarray(rng.standard_normal(size), dtype), NamedSharding(mesh, spec)
    )
    if shape.op == "all_gather_matmul":
        fn, specs, out = all_gather_matmul, (P(axis_name), P(None, axis_name)), P(None, axis_name)
        operands = place(specs[0], shape.m, shape.k), place(specs[1], shape.k, p * shape.n)
    else:
        fn, specs, out = matmul_reduce_scatter, (P(None, axis_name), P(axis_name)), P(axis_name)
        operands = place(specs[0], shape.m, p * shape.k), place(specs[1], p * shape.k, shape.n)
    programs = {}
    for label, method in comm_gemm_methods(shape.op, p).items():
        options = method_options(label, method)

        def one(x, w, options=options):
            return fn(x, w, axis_name=axis_name, **options)

        programs[label] = jax.jit(
            jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        )
    times: dict[str, list[float]] = {label: [] for label in programs}
    for _ in range(repeats):
        for label, program in programs.items():
            jax.block_until_ready(program(*operands))
            begin = time.perf_counter()
            jax.block_until_ready(program(*operands))
            times[label].append(time.perf_counter() - begin)
    return {label: min(values) for label, values in times.items()}


def method_options(label: str, method) -> dict[str, Any]:
    """The keywords of the user's layer for a way of `cost.comm_gemm_methods`."""
    options: dict[str, Any] = {"method": method.name}
    if method.name == "PIPELINE":
        options["num_splits"] = method.num_chunks
    if method.name == "RING_EXCHANGE":
        options["use_ce"] = method.copies
        if label == "ring pairs":
            options["aggregate"] = True
    return options


def _of_first_process(table: TuningTable) -> TuningTable:
    if jax.process_count() == 1:
        return table
    # The times alone travel: shapes and labels are the same everywhere.
    flat = np.array([t for times in table.seconds.values() for t in times.values()])
    first = iter(np.asarray(multihost_utils.broadcast_one_to_all(flat)).tolist())
    seconds = {
        shape: {label: next(first) for label in times} for shape, times in table.seconds.items()
    }
    return table._replace(seconds=seconds)
