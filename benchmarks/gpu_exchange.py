"""Measures dispatch and combine on one GPU: bandwidth against a copy, launches, planning.

All ranks are on one GPU, so the results say nothing about NVLink. Bytes are those of the rows read
and written once; the device-to-device copy moves the same number.
"""

import sys

import common
import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch import combine, compute_metadata, dispatch, plan_attention

W = 8
TOTAL_BYTES = 512 << 20
ROW_BYTES = (256, 512, 1024, 2048, 4096, 8192, 16384)
LAUNCH_ROWS = (W, 4096)  # of 16 bytes


def bandwidth(row_bytes, implementation, total_bytes, repeats):
    """Measures one row of results: every rank sends an equal share to every rank and back."""
    tokens = total_bytes // W // row_bytes
    lengths = np.full((W, W), tokens // W, np.int32)
    metadata, _ = compute_metadata(lengths, np.tile(np.arange(W, dtype=np.int32), (W, 1)))
    options = {"axis_name": "cp", "implementation": implementation}
    send = jax.jit(lambda x, m: dispatch(x, m, capacity=tokens, **options))
    combine_rows = jax.jit(lambda y, m: combine(y, m, num_tokens=tokens, **options))
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))  # reads and writes every byte once
    x = jax.random.bits(jax.random.key(0), (W * tokens, row_bytes // 4), jnp.uint32)
    moved = 2 * x.nbytes
    result = {"what": "bandwidth", "row_bytes": row_bytes, "implementation": implementation}
    seconds = {
        "copy": common.seconds_in_a_row(lambda: copy(x), repeats),
        "dispatch": common.seconds_in_a_row(lambda: send(x, metadata), repeats),
        "combine": common.seconds_in_a_row(lambda: combine_rows(x, metadata), repeats),
    }
    for name, value in seconds.items():
        result[f"{name}_GB_per_s"] = round(moved / value / 1e9, 1)
    for name in ("dispatch", "combine"):  # one pass, as all ranks are on one device
        result[f"{name}_of_copy"] = round(seconds["copy"] / seconds[name], 3)
    return result


def launch_overhead(rows, implementation, repeats):
    """Measures a nearly empty exchange, alone and in a loop inside one program.

    Arrays have `rows` rows per rank, of which `W` move: few are a small call, in one kernel; many
    are a call in several.
    """
    metadata, _ = compute_metadata(
        np.ones((W, W), np.int32), np.tile(np.arange(W, dtype=np.int32), (W, 1))
    )
    options = {"axis_name": "cp", "implementation": implementation}
    once = lambda x: dispatch(x, metadata, capacity=rows, **options)
    many = lambda x: jax.lax.fori_loop(0, 100, lambda _, x: once(x), x)
    x = jnp.zeros((W * rows, 4), jnp.float32)
    alone, loop = jax.jit(once), jax.jit(many)
    return {
        "what": "launch",
        "rows": rows,
        "implementation": implementation,
        "alone_us": round(1e6 * common.seconds_in_a_row(lambda: alone(x), repeats), 2),
        "in_a_loop_us": round(1e4 * common.seconds_in_a_row(lambda: loop(x), repeats), 2),
    }


def planning(repeats):
    """Measures planning on the device."""
    rng = np.random.default_rng(0)
    tokens = 8192
    ids = np.repeat(
        np.arange(1, W * 16 + 1), rng.multinomial(W * tokens, [1 / (W * 16)] * (W * 16))
    )
    ids = jnp.asarray(ids[None])
    plan = jax.jit(lambda ids: plan_attention(ids, world_size=W))
    return {
        "what": "planning",
        "tokens": W * tokens,
        "documents": W * 16,
        "ms": round(1e3 * common.seconds_in_a_row(lambda: plan(ids), repeats), 3),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--implementation", default="cuda_peer", help="cuda_peer, or xla")
    parser.add_argument("--bytes", type=int, default=TOTAL_BYTES, help="rows of all ranks")
    parser.add_argument("--only", choices=["bandwidth", "launch", "planning"])
    arguments = parser.parse_args()
    chosen, repeats = arguments.implementation, arguments.repeats
    device = jax.devices()[0]
    report = common.Report(arguments.output, f"{W} ranks on one {device.device_kind}")
    for n in ROW_BYTES if arguments.only in (None, "bandwidth") else ():
        report.section(
            f"rows of {n} bytes", lambda n=n: [bandwidth(n, chosen, arguments.bytes, repeats)]
        )
    if arguments.only in (None, "launch"):
        report.section(
            "launch", lambda: [launch_overhead(rows, chosen, repeats) for rows in LAUNCH_ROWS]
        )
    if arguments.only in (None, "planning"):
        report.section("planning", lambda: [planning(repeats)])
    sys.exit(report.has_failed)


if __name__ == "__main__":
    main()
