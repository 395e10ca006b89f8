"""Measures movement for `bench_cost_model`, and predicts it.

Run as a program, in several processes, it prints the times of the movement between them.
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
MB_PER_RANK = (0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
FITTED_MB = (0.0625, 0.25, 1, 4, 16)
CHECKED_RANKS = {PROCESSES: (), DEVICES: (4,)}  # of which nothing is fitted
MB_PER_ROUND = 16  # of one program; decides the calls


def measure(all_ranks: tuple[int, ...], rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields rows with the seconds of one exchange in each round."""
    place = PROCESSES if jax.process_count() > 1 else DEVICES
    programs = {}
    for ranks in all_ranks:
        for megabytes in FITTED_MB[:3] if quick else MB_PER_RANK:
            calls = max(1, min(20, int(MB_PER_ROUND / (STEPS * ranks * megabytes))))
            for what, run in movement_programs(ranks, megabytes):
                programs[ranks, megabytes, what] = Program(run, calls)
    for (ranks, megabytes, what), times in in_rounds(programs, rounds).items():
        is_fit = megabytes in FITTED_MB and ranks not in CHECKED_RANKS[place]
        yield {
            "what": what,
            "place": place,
            "ranks": ranks,
            "MB_per_rank": megabytes,
            "use": "fit" if is_fit else "check",
            "times": [seconds / STEPS for seconds in times],
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
        loop = lambda x, m, move=move: jax.lax.scan(
            lambda x, _: (move(x, m), None), x, length=STEPS
        )[0]
        program = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
        yield name, functools.partial(program, x, metadata)


def predicted_seconds(row: dict[str, Any], hardware: Hardware) -> float:
    """Predicts the time of a row of `measure`."""
    return hardware.exchange_seconds(row["MB_per_rank"] * 2**20, num_ranks=row["ranks"], inside=1)


def main() -> None:
    """Measures movement between the processes of a job."""
    arguments = common.options(common.parser(None))
    cp.initialize()
    for row in measure((jax.process_count(),), arguments.repeats, arguments.quick):
        if jax.process_index() == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
