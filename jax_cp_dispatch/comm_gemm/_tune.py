"""`tune`: measures every method on the devices of a mesh."""

import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._ranks.axis import check_mesh
from jax_cp_dispatch.comm_gemm.choice.tuning import TuningTable, method_options
from jax_cp_dispatch.comm_gemm.matmul import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.cost import CommGemmShape, comm_gemm_methods


def tune(
    shapes: Iterable[tuple[str, int, int, int]],
    *,
    mesh: Mesh,
    axis_name: str,
    dtype: Any = jnp.float32,
    repeats: int = 7,
) -> TuningTable:
    """Measures every method on the devices of a mesh.

    Call on the host, outside tracing. Methods are interleaved, `repeats` times. Each runs twice in
    a row and the second run is timed; the minimum counts, because disturbances only add time. With
    several processes, all must call it, and all get the first one's measurements.

    Args:
      shapes: of global matmuls: "all_gather_matmul" or "matmul_reduce_scatter", tokens M, and K
        and N of the whole weight [K, N], of which N or K is split over the ranks.
      mesh: the measurement also uses the devices along its other axes.
      axis_name: the mesh axis of the ranks.
      dtype: of the operands.
      repeats: number of measured rounds, at least 1.
    Returns:
      The table, for `use_tuning` and `TuningTable.save`.
    Raises:
      TypeError: `mesh` is not a mesh, or `dtype` is not a type.
      ValueError: a shape is not divisible by the ranks, or names another function.
    """
    if repeats < 1:
        raise ValueError(f"tune: repeats is {repeats}; it needs to be at least 1.")
    check_mesh("tune", mesh)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"tune: axis_name {axis_name!r} is not an axis of the mesh, {dict(mesh.shape)}. Name "
            "the axis of the ranks."
        )
    p = mesh.shape[axis_name]
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"tune: dtype is {dtype!r}; it needs to be a floating-point type."
        ) from None
    seconds = {}
    for op, m, k, n in shapes:
        if op not in ("all_gather_matmul", "matmul_reduce_scatter"):
            raise ValueError(
                f"tune: got a shape of {op!r}; it needs to be of all_gather_matmul or "
                "matmul_reduce_scatter."
            )
        gathers = op == "all_gather_matmul"
        if m % p or (n if gathers else k) % p:
            raise ValueError(
                f"tune: {op} of M={m}, K={k}, N={n} is not divisible by {p} ranks. "
                f"Pass multiples of {p}."
            )
        shape = CommGemmShape(
            op, m, k if gathers else k // p, n // p if gathers else n, p, dtype.itemsize
        )
        seconds[shape] = _measure(shape, mesh, axis_name, dtype, repeats)
    device = mesh.devices.flat[0]
    machine = {"platform": device.platform, "device": device.device_kind, "jax": jax.__version__}
    return _of_first_process(TuningTable(machine, seconds))


def _measure(shape: CommGemmShape, mesh, axis_name, dtype, repeats) -> dict[str, float]:
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


def _of_first_process(table: TuningTable) -> TuningTable:
    if jax.process_count() == 1:
        return table
    # Only times are exchanged, since shapes and labels are equal in all processes.
    flat = np.array([t for times in table.seconds.values() for t in times.values()])
    first = iter(np.asarray(multihost_utils.broadcast_one_to_all(flat)).tolist())
    seconds = {
        shape: {label: next(first) for label in times} for shape, times in table.seconds.items()
    }
    return table._replace(seconds=seconds)
