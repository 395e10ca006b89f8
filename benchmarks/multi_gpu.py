"""Measures dispatch, attention and GEMMs over several GPUs; each is first compared with XLA's.

One process with all GPUs:      python benchmarks/multi_gpu.py --output report.json
One process per GPU:            benchmarks/multi_gpu.sh (plain, or under Slurm's srun)
The same without GPUs:          python benchmarks/multi_gpu.py --cpu-devices 4 --small

The measurements are those of `python -m jax_cp_dispatch bench`.
"""

import dataclasses
import os

import common
import jax

from jax_cp_dispatch import available_implementations
from jax_cp_dispatch.bench_command import attention, gemm, movement
from jax_cp_dispatch.bench_command.ranks import Ranks, Row
from jax_cp_dispatch.bench_command.sizes import sizes_for
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.gpu import connect_gpus


def say(text: object) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def measure(ranks: Ranks, *, small: bool) -> list[Row]:
    sizes = sizes_for(
        "cpu" if small else "gpu", quick=small, num_ranks=ranks.count, num_processes=1
    )
    moved = sizes.moved_tokens, sizes.feature, jax.numpy.dtype(sizes.moved_dtype)
    attended = sizes.attention_tokens, sizes.heads, sizes.head_size, sizes.dtype
    rows = []
    for section in (
        movement.large(ranks, *moved, movement.SECTION),
        movement.small(ranks, movement.SECTION),
        attention.measure(ranks, *attended),
        gemm.measure(ranks, sizes.gemms, sizes.dtype),
    ):
        for row in section:
            say(row)
            rows.append(row)
    return rows


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
        say(connect_gpus())
    elif options.cpu_devices:
        start_cpu_devices(options.cpu_devices)
    say({name: tuple(found) for name, found in available_implementations().items()})
    ranks = Ranks.of_devices(jax.device_count(), options.repeats)
    rows = measure(ranks, small=options.small)
    if jax.process_index() == 0:
        title = f"{ranks.name}, {jax.devices()[0].device_kind}, {jax.process_count()} processes"
        common.write(options.output, title, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    main()
