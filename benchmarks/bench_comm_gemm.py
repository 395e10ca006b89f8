"""Measures tensor-parallel GEMMs of a Llama-like layer: each method against XLA.

4096 tokens, model size 1024, 2816 in the MLP, 256 for keys and values each: Llama 3 8B with every
width divided by 4 (its MLP by 5). The XLA baseline is `all_gather` then a GEMM, or a GEMM then
`psum_scatter`. Its parts alone give the bound, max(GEMM, communication). "auto" follows the
cost model.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import common
import jax
import jax.numpy as jnp

from jax_cp_dispatch.comm_gemm import choose_comm_gemm
from jax_cp_dispatch.cost import CommGemmShape
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.profiling import overlap_profile
from jax_cp_dispatch.tools.programs import AXIS, GATHER, GEMM, SCATTER, XLA, Product, Ranks

AG, RS, COMMUNICATION = GATHER, SCATTER, "communication"


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
METHODS = {
    AG: ("none", "ring", "ring direct", "ring pairs", "ring atomic", "auto"),
    RS: (
        *("none", "ring", "ring direct", "ring atomic"),
        *("pipeline 2", "pipeline 4", "pipeline atomic", "auto"),
    ),
}


def measure(layer: Layer, ranks: Ranks, dtype: str) -> list[dict]:
    p, gathers = ranks.count, layer.op == AG
    product = Product(ranks, layer[1:], dtype, METHODS[layer.op])
    product.check()
    parts = {GEMM: product.alone, COMMUNICATION: _communication(ranks, product)}
    seconds = ranks.measure(product.runs | parts)
    gemm, communication = seconds[GEMM], seconds[COMMUNICATION]
    shape = CommGemmShape(
        layer.op,  # pyright: ignore[reportArgumentType]
        layer.m,
        *((layer.k, layer.n // p) if gathers else (layer.k // p, layer.n)),
        num_ranks=p,
        itemsize=jnp.dtype(dtype).itemsize,
    )
    rows = []
    for label, run in product.programs.items():
        operands = product.x, product.w
        profile = None if label == XLA else overlap_profile(run, *operands)
        memory = run.lower(*operands).compile().memory_analysis()
        row = {
            "devices": p,
            "dtype": jnp.dtype(dtype).name,
            "layer": layer.name,
            "op": layer.op,
            "M": layer.m,
            "K": layer.k,
            "N": layer.n,
            "what": "xla" if label == XLA else label,
            "ms": round(1e3 * seconds[label], 1),
            "of_xla": round(seconds[XLA] / seconds[label], 3),
            "gemm_ms": round(1e3 * gemm, 1),
            "communication_ms": round(1e3 * communication, 1),
            "communication_share": round(communication / (gemm + communication), 2),
            "bound_ms": round(1e3 * max(gemm, communication), 1),
            "exposed_ms": profile and round(1e3 * profile.exposed_communication, 2),
            "extra_MB_per_rank": memory and round(memory.temp_size_in_bytes / 2**20, 1),
        }
        if label == "auto":
            row["chosen"] = choose_comm_gemm(shape).label
        rows.append(row)
        print(
            "{devices:3d} {dtype:<9}{layer:<22}{what:<16}{ms:8.1f} ms {of_xla:6.2f} of XLA's "
            "(bound {bound_ms}, share {communication_share})".format(**row),
            row.get("chosen", ""),
            flush=True,
        )
    return rows


def _communication(ranks: Ranks, product: Product) -> Callable[[], jax.Array]:
    """Returns a run of XLA's collective alone."""
    if product.op == AG:
        gather = ranks.program(lambda x: jax.lax.all_gather(x, AXIS, tiled=True)[None])
        return partial(gather, product.x)
    scatter = ranks.program(lambda y: jax.lax.psum_scatter(y, AXIS, tiled=True))
    return partial(scatter, product.alone())


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
        ranks = Ranks.of_devices(num_ranks, arguments.repeats)
        for dtype in arguments.dtypes:
            for layer in layers:
                rows += measure(layer, ranks, dtype)
    common.write(arguments.output, "tensor-parallel forward GEMMs", rows)


if __name__ == "__main__":
    main()
