"""Measures movement for `bench_cost_model`, and predicts it.

Run as a program, it prints the times of the movement between the devices of a job.
"""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import common
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rounds import Program, in_rounds

import jax_cp_dispatch as cp
from jax_cp_dispatch.cost import Hardware

AXIS, FEATURES, STEPS = "cp", 1024, 4  # rows of 4 KB; exchanges in one program
PROCESSES, DEVICES = "processes", "virtual devices"
FITTED_MB = (0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8)  # per rank
CHECKED_MB = (0.09375, 0.1875, 0.375, 0.75, 1.5, 3, 6, 12)
RANKS = (2, 4, 8)  # virtual devices
CHECKED_RANKS = {PROCESSES: (), DEVICES: (4,)}  # of which nothing is fitted
MB_PER_ROUND = 256  # of one program; decides the calls, of which there are 4 to 20
UNTIMED_ROUNDS = 2  # in which a process takes fresh memory from the system, page by page


def measure(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields rows with the seconds of one exchange in each round."""
    processes = jax.process_count()
    place = PROCESSES if processes > 1 else DEVICES
    programs = {}
    for ranks in (processes,) if processes > 1 else RANKS:
        for megabytes in FITTED_MB[:3] if quick else sorted(FITTED_MB + CHECKED_MB):
            calls = max(4, min(20, int(MB_PER_ROUND / (STEPS * ranks * megabytes))))
            for what, run in movement_programs(ranks, megabytes):
                programs[ranks, megabytes, what] = Program(run, calls)
    for (ranks, megabytes, what), times in in_rounds(programs, UNTIMED_ROUNDS + rounds).items():
        is_fit = megabytes in FITTED_MB and ranks not in CHECKED_RANKS[place]
        yield {
            "what": what,
            "place": place,
            "ranks": ranks,
            "MB_per_rank": megabytes,
            "use": "fit" if is_fit else "check",
            "times": [seconds / STEPS for seconds in times[UNTIMED_ROUNDS:]],
        }


def movement_programs(ranks: int, megabytes: float) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields programs of `STEPS` exchanges in which each rank sends an equal part to every rank."""
    tokens = int(megabytes * 2**20) // (4 * FEATURES)
    mesh = Mesh(np.array(jax.devices()[:ranks]), (AXIS,))
    put = lambda x: jax.make_array_from_callback(
        np.shape(x), NamedSharding(mesh, P(AXIS)), lambda i: np.asarray(x)[i]
    )
    seq_len = np.full((ranks, ranks), tokens // ranks, np.int32)
    destinations = np.tile(np.arange(ranks, dtype=np.int32), (ranks, 1))
    metadata = jax.tree.map(put, cp.compute_metadata(seq_len, destinations)[0])
    x = put(np.random.default_rng(0).standard_normal((ranks * tokens, FEATURES), np.float32))
    for name, move in (
        ("dispatch", lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=tokens)),
        ("combine", lambda x, m: cp.combine(x, m, axis_name=AXIS, num_tokens=tokens)),
    ):
        chain = lambda x, m, move=move: functools.reduce(lambda x, _: move(x, m), range(STEPS), x)
        program = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
        yield name, functools.partial(program, x, metadata)


def predicted_seconds(row: dict[str, Any], hardware: Hardware) -> float:
    """Predicts the time of a row of `measure`."""
    n = row["ranks"]
    message = row["MB_per_rank"] * 2**20 / n
    return hardware.exchange_seconds(message, num_ranks=n, inside=n - 1, own_bytes=message)


def main() -> None:
    """Measures movement between the devices of a job."""
    arguments = common.options(common.parser(None))
    cp.initialize()
    for row in measure(arguments.repeats, arguments.quick):
        if jax.process_index() == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
