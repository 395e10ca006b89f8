"""Measures scaling modes of tensor-parallel GEMMs: moved bytes, time, and error.

Two layers of a Llama-like MLP (4096 tokens, model size 1024, 2816 hidden) on virtual CPU devices,
forward and with derivative, in a ring: bfloat16, then each scaling mode with the same operands. The
error compares with a float64 GEMM: per token, the root mean square of the error relative to that of
the exact result; then over all tokens. It is also measured for tokens whose magnitudes differ by up
to 2**20. Bytes are those of received tokens or gradients with their scales. The CPU widens 8-bit
operands before it multiplies, so times show the cost of scaling and the gain of fewer bytes, but
not the speed of tensor cores.
"""

import dataclasses
import functools

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.scaling import MatmulScaling, ScalingMode, quantize

AXIS = "tp"
MODEL, HIDDEN = 1024, 2816
UP, DOWN = "gate or up", "down"


def arriving_bytes(mode: ScalingMode, tokens: int, columns: int, num_ranks: int) -> int:
    """Returns the bytes of the other ranks' tokens (or gradients) and their scales."""
    own = jnp.zeros((tokens // num_ranks, columns), jnp.bfloat16)
    if mode == ScalingMode.NO_SCALING:
        return (num_ranks - 1) * own.nbytes
    is_mxfp8 = mode == ScalingMode.MXFP8_1D_SCALING
    q = quantize(own, mode if is_mxfp8 else ScalingMode.CURRENT_TENSOR_SCALING)
    return (num_ranks - 1) * (q.data.nbytes + q.scale_inv.nbytes)


def error_of(got, x, w) -> float:
    """Returns the root mean square over tokens of the relative error of each."""
    wide = lambda a: np.asarray(a).astype(np.float64)
    exact = wide(x) @ wide(w)
    by_token = ((wide(got) - exact) ** 2).mean(1) / (exact**2).mean(1)
    return float(np.sqrt(by_token.mean()))


def fitting(state: MatmulScaling, *arrays) -> MatmulScaling:
    """Returns delayed scales as after previous steps with the same operands."""
    of_each = zip((state.x, state.w, state.dy), arrays, (448, 448, 57344), strict=True)
    x, w, dy = (
        dataclasses.replace(old, scale=largest / jnp.abs(a.astype(jnp.float32)).max()[None])
        for old, a, largest in of_each
    )
    return MatmulScaling(x=x, w=w, dy=dy)


def measure(layer: str, mesh: Mesh, tokens: int, repeats: int) -> list[dict]:
    p, gathers = mesh.shape[AXIS], layer == UP
    k, n = (MODEL, HIDDEN) if gathers else (HIDDEN, MODEL)
    by_rows, by_columns = P(AXIS), P(None, AXIS)
    in_specs = (by_rows, by_columns) if gathers else (by_columns, by_rows)
    out_spec = by_columns if gathers else by_rows
    random = np.random.default_rng(0)

    def put(spec, *shape):
        drawn = jnp.asarray(random.standard_normal(shape), jnp.bfloat16)
        return jax.device_put(drawn, NamedSharding(mesh, spec))

    x, w, dy = put(in_specs[0], tokens, k), put(in_specs[1], k, n), put(out_spec, tokens, n)
    small = 2.0 ** -random.uniform(0, 20, (tokens, 1))
    spread = jax.device_put((x * small).astype(x.dtype), x.sharding)
    fn = all_gather_matmul if gathers else matmul_reduce_scatter

    def product(mode, x, w, state):
        delayed = {"scaling_state": state} if mode == ScalingMode.DELAYED_TENSOR_SCALING else {}
        return fn(x, w, axis_name=AXIS, method="ring", scaling_mode=mode, **delayed)

    def with_derivative(mode, x, w, state, dy):
        out, pull = jax.vjp(functools.partial(product, mode), x, w, state)
        return out, pull(dy)[:2]

    def programs(mode):
        run = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        forward = run(
            functools.partial(product, mode), in_specs=(*in_specs, P()), out_specs=out_spec
        )
        both = run(
            functools.partial(with_derivative, mode),
            in_specs=(*in_specs, P(), out_spec),
            out_specs=(out_spec, in_specs),
        )
        return jax.jit(forward), jax.jit(both)

    runs, errors = {}, {}
    for mode in ScalingMode:
        forward, both = programs(mode)
        state = fitting(MatmulScaling.init(), x, w, dy)
        runs[mode, "forward"] = functools.partial(forward, x, w, state)
        runs[mode, "forward and backward"] = functools.partial(both, x, w, state, dy)
        errors[mode] = [error_of(forward(each, w, state), each, w) for each in (x, spread)]
    seconds = common.interleaved({repr(key): run for key, run in runs.items()}, repeats)
    rows = []
    for mode, what in runs:
        time, base = (seconds[repr((m, what))] for m in (mode, ScalingMode.NO_SCALING))
        moves = gathers or what != "forward"  # a reduce-scatter gathers only the gradient
        columns = (k if gathers else n) if moves else 0
        arriving = [arriving_bytes(m, tokens, columns, p) for m in (mode, ScalingMode.NO_SCALING)]
        row = {
            "devices": p,
            "layer": layer,
            "pass": what,
            "mode": "bfloat16" if mode == ScalingMode.NO_SCALING else mode.name,
            "ms": round(1e3 * time, 1),
            "of_bfloat16": round(base / time, 3),
            "arriving_MiB": round(arriving[0] / 2**20, 3),
            "of_bfloat16_bytes": round(arriving[0] / arriving[1], 4) if moves else None,
            "error": errors[mode][0],
            "error_of_spread_tokens": errors[mode][1],
        }
        rows.append(row)
        print(
            "{devices} {layer:<11}{pass:<22}{mode:<24}{ms:8.1f} ms {of_bfloat16:6.2f} of bfloat16, "
            "{arriving_MiB:.2f} MiB, error {error:.1e}, {error_of_spread_tokens:.1e}".format(**row),
            flush=True,
        )
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = common.options(parser, devices=2, tokens=256)
    start_cpu_devices(arguments.devices)
    mesh = Mesh(np.array(jax.devices()[: arguments.devices]), (AXIS,))
    rows = [
        row
        for layer in (UP, DOWN)
        for row in measure(layer, mesh, arguments.tokens, arguments.repeats)
    ]
    sizes = (
        f"{arguments.tokens} tokens, model size {MODEL}, {HIDDEN} hidden, ring, bfloat16 operands"
    )
    common.write(arguments.output, f"scaling modes of tensor-parallel GEMMs ({sizes})", rows)


if __name__ == "__main__":
    main()
