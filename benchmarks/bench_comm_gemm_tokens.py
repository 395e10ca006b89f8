"""Measures overlapped GEMMs with tokens sharded over context and tensor parallelism.

x is [2, 2048, 512] on a mesh of cp 4 and tp 2, with tokens over both; the weights, [512, 2048] and
back, are sharded over tp. Measures the first GEMM, both, and both with derivative: on global
arrays, inside `shard_map`, with tokens reshaped to [B, cp, T/cp, D], and with XLA's partitioner.
This package's programs contain no all-gather of XLA; only the ring communicates, over tp.
"""

import functools
import re
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.cpu_devices import start_cpu_devices

SIZES = {"data": 1, "cp": 4, "tp": 2}
B, T, D, F = 2, 2048, 512, 2048
TOKENS, HIDDEN = P("data", ("cp", "tp")), P("data", "cp", "tp")
UP, DOWN = P(None, "tp"), P("tp")
XLA = "XLA's partitioner"


def main() -> None:
    arguments = common.options(common.parser(__doc__))
    start_cpu_devices(8)
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 3)
    rng = np.random.default_rng(0)
    put = lambda spec, *shape: jax.device_put(
        jnp.asarray(rng.standard_normal(shape), jnp.float32), NamedSharding(mesh, spec)
    )
    x, up, down = put(TOKENS, B, T, D), put(UP, D, F), put(DOWN, F, D)
    constrain = lambda a, spec: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))
    gather = functools.partial(all_gather_matmul, axis_name="tp")
    scatter = functools.partial(matmul_reduce_scatter, axis_name="tp")
    split = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    blocks = lambda x: x.reshape(B, SIZES["cp"], T // SIZES["cp"], -1)
    whole = lambda x: x.reshape(B, T, -1)
    of_blocks = P("data", "cp", "tp")
    firsts = {
        "global arrays": functools.partial(gather, mesh=mesh),
        "shard_map": split(gather, in_specs=(TOKENS, UP), out_specs=HIDDEN),
        "tokens reshaped": lambda x, w: whole(
            gather(constrain(blocks(x), of_blocks), w, mesh=mesh)
        ),
        XLA: lambda x, w: constrain(x @ w, HIDDEN),
    }
    seconds = {
        "global arrays": functools.partial(scatter, mesh=mesh),
        "shard_map": split(scatter, in_specs=(HIDDEN, DOWN), out_specs=TOKENS),
        "tokens reshaped": lambda h, w: whole(scatter(blocks(h), w, mesh=mesh)),
        XLA: lambda h, w: constrain(h @ w, TOKENS),
    }

    def both(way):
        return lambda x, up, down: seconds[way](jax.nn.gelu(firsts[way](x, up)), down)

    def step(way):
        return jax.grad(lambda *a: (both(way)(*a) ** 2).sum(), (0, 1, 2))

    rows = []
    for what, make, operands in (
        ("first GEMM", firsts.__getitem__, (x, up)),
        ("both GEMMs", both, (x, up, down)),
        ("both GEMMs and their derivative", step, (x, up, down)),
    ):
        programs: dict[str, Any] = {
            way: jax.jit(make(way)).lower(*operands).compile() for way in firsts
        }
        expected = jax.tree.map(np.asarray, programs[XLA](*operands))
        for program in programs.values():
            for got, want in zip(
                jax.tree.leaves(program(*operands)), jax.tree.leaves(expected), strict=True
            ):
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.abs(want).max())
        runs = {way: functools.partial(run, *operands) for way, run in programs.items()}
        times = common.interleaved(runs, arguments.repeats)
        for way, program in programs.items():
            gathers = len(re.findall(r" all-gather(?:-start)?\(", program.as_text() or ""))
            row = {
                "what": what,
                "way": way,
                "ms": round(1e3 * times[way], 1),
                "of_xla": round(times[XLA] / times[way], 2),
                "all_gathers": gathers,
            }
            rows.append(row)
            print(*row.values(), flush=True)
    common.write(arguments.output, "tokens over cp 4 and tp 2", rows)


if __name__ == "__main__":
    main()
