"""Measures tensor-parallel GEMMs of a Llama-like layer: each method against XLA.

4096 tokens, model size 1024, 2816 in the MLP, 256 for keys and values each: Llama 3 8B with every
width divided by 4 (its MLP by 5). The XLA baseline is `all_gather` then a GEMM, or a GEMM then
`psum_scatter`. Its parts alone give the bound, max(GEMM, communication). "auto" follows a table
that `tune` measures first, in the same process.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, choose_comm_gemm, matmul_reduce_scatter
from jax_cp_dispatch.cost import CommGemmShape
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.profiling import current_tuning, overlap_profile, tune, use_tuning

AXIS = "tp"
AG, RS = "all_gather_matmul", "matmul_reduce_scatter"


class Layer(NamedTuple):
    """A GEMM of global size M K N."""

    name: str
    op: str
    m: int
    k: int
    n: int


LAYERS = (
    Layer("keys and values", AG, 4096, 1024, 512),
    Layer("queries, keys, values", AG, 4096, 1024, 1536),
    Layer("gate and up", AG, 4096, 1024, 5632),
    Layer("attention output", RS, 4096, 1024, 1024),
    Layer("down", RS, 4096, 2816, 1024),
)
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    AG: {
        "none": {"method": "none"},
        "ring": {"method": "ring"},
        "ring direct": {"method": "ring", "use_ce": False},
        "ring pairs": {"method": "ring", "aggregate": True},
        "ring atomic": {"method": "ring", "atomic": True},
        "auto": {},
    },
    RS: {
        "none": {"method": "none"},
        "ring": {"method": "ring"},
        "ring direct": {"method": "ring", "use_ce": False},
        "ring atomic": {"method": "ring", "atomic": True},
        "pipeline 2": {"method": "pipeline", "num_splits": 2},
        "pipeline 4": {"method": "pipeline"},
        "pipeline atomic": {"method": "pipeline", "atomic": True},
        "auto": {},
    },
}


def xla_way(op: str) -> Callable:
    if op == AG:
        return lambda x, w: lax.all_gather(x, AXIS, axis=0, tiled=True) @ w
    return lambda x, w: lax.psum_scatter(x @ w, AXIS, tiled=True)


def measure(layer: Layer, mesh: Mesh, dtype: Any, repeats: int) -> list[dict]:
    p = mesh.shape[AXIS]
    gathers = layer.op == AG
    rng = np.random.default_rng(0)

    def put(spec, *shape):
        return jax.device_put(
            jnp.asarray(rng.standard_normal(shape), dtype), NamedSharding(mesh, spec)
        )

    by_rows, by_columns = P(AXIS), P(None, AXIS)
    in_specs = (by_rows, by_columns) if gathers else (by_columns, by_rows)
    out_spec = by_columns if gathers else by_rows

    def program(fn, in_specs=in_specs, out_spec=out_spec):
        return jax.jit(
            jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)
        )

    x, w = put(in_specs[0], layer.m, layer.k), put(in_specs[1], layer.k, layer.n)
    fn = all_gather_matmul if gathers else matmul_reduce_scatter
    programs = {"xla": program(xla_way(layer.op))} | {
        label: program(functools.partial(fn, axis_name=AXIS, **options))
        for label, options in METHODS[layer.op].items()
    }
    runs = {label: functools.partial(run, x, w) for label, run in programs.items()}
    if gathers:  # the parts: a GEMM of gathered operands, and the all-gather
        whole = put(P(), layer.m, layer.k)
        multiply = program(lambda x, w: x @ w, (P(), by_columns), by_columns)
        gather = program(lambda x: lax.all_gather(x, AXIS, axis=0, tiled=True)[None], by_rows)
        runs |= {"GEMM": functools.partial(multiply, whole, w)}
        runs |= {"communication": functools.partial(gather, x)}
    else:
        partial = put(by_rows, p * layer.m, layer.n)
        runs |= {"GEMM": functools.partial(program(lambda x, w: x @ w, in_specs, by_rows), x, w)}
        scatter = program(lambda y: lax.psum_scatter(y, AXIS, tiled=True), by_rows, by_rows)
        runs |= {"communication": functools.partial(scatter, partial)}
    expected = np.asarray(runs["xla"](), np.float32)
    for label in METHODS[layer.op]:
        out = np.asarray(runs[label](), np.float32)
        np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2 * np.abs(expected).max())
    seconds = common.interleaved(runs, repeats)
    gemm, communication = seconds["GEMM"], seconds["communication"]
    shape = CommGemmShape(
        layer.op,  # pyright: ignore[reportArgumentType]
        layer.m,
        *((layer.k, layer.n // p) if gathers else (layer.k // p, layer.n)),
        num_ranks=p,
        itemsize=jnp.dtype(dtype).itemsize,
    )
    rows = []
    for label, run in programs.items():
        profile = None if label == "xla" else overlap_profile(run, x, w)
        memory = run.lower(x, w).compile().memory_analysis()
        row = {
            "devices": p,
            "dtype": jnp.dtype(dtype).name,
            "layer": layer.name,
            "op": layer.op,
            "M": layer.m,
            "K": layer.k,
            "N": layer.n,
            "what": label,
            "ms": round(1e3 * seconds[label], 1),
            "of_xla": round(seconds["xla"] / seconds[label], 3),
            "gemm_ms": round(1e3 * gemm, 1),
            "communication_ms": round(1e3 * communication, 1),
            "communication_share": round(communication / (gemm + communication), 2),
            "bound_ms": round(1e3 * max(gemm, communication), 1),
            "exposed_ms": profile and round(1e3 * profile.exposed_communication, 2),
            "extra_MB_per_rank": memory and round(memory.temp_size_in_bytes / 2**20, 1),
        }
        if label == "auto":
            row["chosen"] = choose_comm_gemm(shape, table=current_tuning()).label
        rows.append(row)
        print(
            "{devices:3d} {dtype:<9}{layer:<22}{what:<16}{ms:8.1f} ms {of_xla:6.2f} of XLA's "
            "(bound {bound_ms}, share {communication_share})".format(**row),
            row.get("chosen", ""),
            flush=True,
        )
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--divide", type=int, default=1, help="all sizes of the layers by this")
    arguments = common.options(parser, devices=[4], dtypes=["float32"], divide=4)
    layers = [
        Layer(name, op, *(size // arguments.divide for size in sizes))
        for name, op, *sizes in LAYERS
    ]
    start_cpu_devices(max(arguments.devices))
    rows = []
    for num_ranks in arguments.devices:
        mesh = Mesh(np.array(jax.devices()[:num_ranks]), (AXIS,))
        for dtype in arguments.dtypes:
            shapes = [(layer.op, layer.m, layer.k, layer.n) for layer in layers]
            use_tuning(tune(shapes, mesh=mesh, axis_name=AXIS, dtype=dtype))
            for layer in layers:
                rows += measure(layer, mesh, dtype, arguments.repeats)
    common.write(arguments.output, "tensor-parallel forward GEMMs", rows)


if __name__ == "__main__":
    main()
