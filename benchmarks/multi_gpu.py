"""Checks and measures dispatch, attention and GEMMs over several GPUs.

One process with all GPUs:      python benchmarks/multi_gpu.py --output report.json
One process per GPU:            benchmarks/multi_gpu.sh (plain, or under Slurm's srun)
The same without GPUs:          python benchmarks/multi_gpu.py --cpu-devices 4 --small
"""

import os
import time
from typing import Any

import common
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch import gpu
from jax_cp_dispatch.cpu_devices import start_cpu_devices

AXIS = "cp"
RANKS: Any = P(AXIS)


class Job:
    """The devices of all processes, and operations for every measurement."""

    def __init__(self, repeats: int):
        self.mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self.num_ranks = jax.device_count()
        self.repeats = repeats
        self.rows: list[dict[str, Any]] = []

    def put(self, x, spec=RANKS):
        """Puts an array that all processes hold on devices, each with its slice."""
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(self.mesh, spec), lambda i: x[i])

    def on_ranks(self, fn, in_specs=RANKS, out_specs=RANKS):
        return jax.jit(
            jax.shard_map(
                fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        )

    def check(self, what, got, expected, tolerance=0.0):
        """Compares, in each process, the part that it holds."""
        for shard in got.addressable_shards:
            np.testing.assert_allclose(
                np.asarray(shard.data, np.float64),
                np.asarray(expected[shard.index], np.float64),
                rtol=tolerance, atol=tolerance, err_msg=what,
            )  # fmt: skip
        gpu.raise_gpu_errors()
        self.say(f"{what}: right")

    def measure(self, what, run, *operands, **more):
        """Measures the median seconds, and the rate of given bytes or FLOPs."""
        jax.block_until_ready(run(*operands))
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            jax.block_until_ready(run(*operands))
            times.append(time.perf_counter() - start)
        seconds = float(np.median(times))
        row: dict[str, Any] = {"what": what, "ms": round(1e3 * seconds, 3)}
        for name, amount in more.items():
            row[name] = round(amount / seconds / 1e9, 2)
        self.rows.append(row)
        self.say(row)

    def say(self, text):
        if jax.process_index() == 0:
            print(text, flush=True)


def measure_dispatch(job: Job, tokens: int, width: int) -> None:
    """Measures dispatch; every rank sends a share of random length to every rank."""
    w = job.num_ranks
    rng = np.random.default_rng(0)
    lengths = rng.multinomial(tokens, [1 / w] * w, size=w).astype(np.int32)
    plan, _ = cpd.compute_metadata(lengths, np.tile(np.arange(w, dtype=np.int32), (w, 1)))
    capacity = int(np.max(plan.num_total_recv_tokens))
    x = rng.normal(size=(w * tokens, width)).astype(np.float32)
    expected = np.zeros((w, capacity, width), np.float32)
    for s in range(w):
        start = s * tokens
        for d in range(w):
            to = int(np.asarray(plan.dst_offset)[s, d])
            expected[d, to : to + lengths[s, d]] = x[start : start + lengths[s, d]]
            start += lengths[s, d]
    arrays, metadata = job.put(x), jax.tree.map(job.put, plan)
    for name in (None, "xla"):
        options: dict[str, Any] = {"axis_name": AXIS, "implementation": name}
        send = job.on_ranks(lambda x, m, o=options: cpd.dispatch(x, m, capacity=capacity, **o))
        bring = job.on_ranks(lambda y, m, o=options: cpd.combine(y, m, num_tokens=tokens, **o))
        title = name or "chosen"
        there = send(arrays, metadata)
        job.check(f"dispatch, {title}", there, expected.reshape(-1, width))
        job.check(f"combine, {title}", bring(there, metadata), x)
        moved = x.nbytes / w * (w - 1) / w  # by each rank, to others
        job.measure(f"dispatch, {title}", send, arrays, metadata, GB_per_s_per_rank=moved)
        job.measure(f"combine, {title}", bring, there, metadata, GB_per_s_per_rank=moved)


def measure_attention(job: Job, tokens: int, heads: int, size: int) -> None:
    """Measures causal attention over one long document and over packed documents."""
    rng = np.random.default_rng(1)
    total = tokens * job.num_ranks
    q, k, v = (rng.normal(size=(1, total, heads, size)).astype(np.float32) for _ in range(3))
    ids = np.repeat(np.arange(1, 9), rng.multinomial(total, [1 / 8] * 8))[None]
    spec = P(None, AXIS)
    few = min(total, 512)  # dense attention of the first rows, which attend to no later ones
    scores = np.einsum("qhd,khd->hqk", q[0, :few], k[0, :few]) / np.sqrt(size)
    visible = np.tril(ids[0, :few, None] == ids[0, None, :few])
    weights = np.exp(np.where(visible, scores, -np.inf))
    dense = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v[0, :few])
    arrays = [job.put(x, spec) for x in (q, k, v)]
    for algorithm in ("balanced", "zigzag", "ring"):

        def attend(q, k, v, algorithm=algorithm):
            options: dict[str, Any] = {"mesh": job.mesh, "axis_name": AXIS, "segment_ids": ids}
            return cpd.context_parallel_attention(q, k, v, algorithm=algorithm, **options)

        run = jax.jit(attend, out_shardings=NamedSharding(job.mesh, spec))
        out = run(*arrays)
        expected = np.full(out.shape, np.nan)
        expected[0, :few] = dense
        for shard in out.addressable_shards:
            wanted = expected[shard.index]
            known = ~np.isnan(wanted)
            np.testing.assert_allclose(np.asarray(shard.data)[known], wanted[known], atol=2e-3)
        job.say(f"attention, {algorithm}: right")
        grad = jax.jit(jax.grad(lambda *x, run=attend: (run(*x) ** 2).sum(), argnums=(0, 1, 2)))
        job.measure(f"attention, {algorithm}, forward", run, *arrays)
        job.measure(f"attention, {algorithm}, and backward", grad, *arrays)


def measure_gemm(job: Job, tokens: int, width: int) -> None:
    """Measures the two tensor-parallel GEMMs."""
    rng = np.random.default_rng(2)
    total = tokens * job.num_ranks
    x, w = rng.normal(size=(total, width)) / width, rng.normal(size=(width, width))
    x, w = x.astype(np.float32), w.astype(np.float32)
    product = x.astype(np.float64) @ w
    flops = 2 * total * width * width / job.num_ranks
    rows, columns = P(AXIS, None), P(None, AXIS)
    for name, op, specs, out in (
        ("all_gather_matmul", cpd.all_gather_matmul, (rows, columns), columns),
        ("matmul_reduce_scatter", cpd.matmul_reduce_scatter, (columns, rows), rows),
    ):
        run = job.on_ranks(lambda x, w, op=op: op(x, w, axis_name=AXIS), specs, out)
        operands = [job.put(a, spec) for a, spec in zip((x, w), specs, strict=True)]
        job.check(name, run(*operands), product, tolerance=1e-2)
        job.measure(name, run, *operands, GFLOP_per_s=flops)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--distributed", action="store_true", help="join the other processes")
    parser.add_argument("--cpu-devices", type=int, default=0, help="virtual CPU devices instead")
    parser.add_argument("--small", action="store_true", help="sizes that take seconds on a CPU")
    options = parser.parse_args()
    if options.distributed:  # Slurm or multi_gpu.sh sets the coordinator
        address = os.environ.get("COORDINATOR_ADDRESS")
        count = int(os.environ.get("NUM_PROCESSES", 0)) or None
        process = os.environ.get("PROCESS_ID")
        jax.distributed.initialize(address, count, None if process is None else int(process))
    elif options.cpu_devices:
        start_cpu_devices(options.cpu_devices)
    job = Job(options.repeats)
    if options.distributed:
        job.say(gpu.connect_gpus())
    job.say({name: tuple(found) for name, found in cpd.available_implementations().items()})
    measure_dispatch(job, *((64, 32) if options.small else (16384, 2048)))
    measure_attention(job, *((64, 2, 16) if options.small else (8192, 16, 128)))
    measure_gemm(job, *((32, 64) if options.small else (4096, 4096)))
    if jax.process_index() == 0:
        kind = jax.devices()[0].device_kind
        title = f"{job.num_ranks} x {kind}, {jax.process_count()} processes"
        common.write(options.output, title, job.rows)


if __name__ == "__main__":
    main()
