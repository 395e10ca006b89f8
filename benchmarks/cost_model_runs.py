"""The programs that `bench_cost_model` measures, each with its prediction.

Run as a program, in several processes, it prints the movement measured between them.
"""

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cp
from jax_cp_dispatch.cost import Hardware, Workload, rows_by_link, step_costs
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.metadata import Metadata

AXIS, FEATURES, STEPS = "cp", 1024, 4  # rows of 4 KB; exchanges in one program
DEVICES = (2, 4, 8)
MB_PER_RANK = (0.0625, 0.25, 1, 2, 4, 8, 16)
FITTED_MB = (0.0625, 1, 4, 16)
HEADS = {"4 heads": (4, 4, 64), "8 heads, 2 of keys": (8, 2, 64), "2 heads of 128": (2, 2, 128)}
ALGORITHMS = ("ring", "zigzag", "balanced", "placed")


@dataclasses.dataclass(frozen=True)
class Case:
    """Input of one comparison of attention; float32."""

    use: str
    ranks: int
    tokens_per_rank: int
    heads: str
    documents: str  # "one", or the seed of log-normal lengths

    @property
    def lengths(self) -> list[int]:
        num_tokens = self.ranks * self.tokens_per_rank
        if self.documents == "one":
            return [num_tokens]
        normal = np.random.default_rng(int(self.documents)).standard_normal(num_tokens)
        ends = np.minimum(np.ceil(512 * np.exp(normal)).cumsum(), num_tokens).astype(int)
        lengths = np.diff(ends, prepend=0)
        return lengths[lengths > 0].tolist()


FIT, CHECK = "fit", "check"
FORWARD, BOTH = "forward", "forward and backward"
CASES = (
    Case(FIT, 8, 512, "4 heads", "one"),
    Case(FIT, 8, 512, "8 heads, 2 of keys", "1"),
    Case(FIT, 8, 1024, "2 heads of 128", "2"),
    Case(FIT, 8, 1024, "4 heads", "3"),
    Case(CHECK, 8, 1024, "4 heads", "one"),
    Case(CHECK, 8, 2048, "4 heads", "4"),
    Case(CHECK, 8, 1024, "8 heads, 2 of keys", "5"),
    Case(CHECK, 4, 1024, "2 heads of 128", "6"),
    Case(CHECK, 8, 512, "4 heads", "7"),
)


def start() -> None:
    start_cpu_devices(max(DEVICES))


def fastest(programs: dict[Any, Callable[[], Any]], repeats: int, clock: str) -> dict[Any, float]:
    """Returns the least seconds of each program; all run in turn, each twice in a row."""
    read = time.perf_counter if clock == "wall" else time.process_time
    times: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, run in programs.items():
            jax.block_until_ready(run())
            begin = read()
            jax.block_until_ready(run())
            times[name].append(read() - begin)
    cores = 1 if clock == "wall" else os.cpu_count() or 1
    return {name: min(values) / cores for name, values in times.items()}


# ---- Movement.


def predict_movement(ranks: int, megabytes: float) -> Callable[[Hardware], float]:
    return lambda hardware: hardware.exchange_seconds(megabytes * 2**20, num_ranks=ranks, inside=1)


def measure_movement(
    all_ranks: tuple[int, ...], repeats: int, quick: bool, clock: str
) -> list[dict[str, Any]]:
    rows, place = [], "processes" if jax.process_count() > 1 else "virtual devices"
    for ranks in all_ranks:
        programs: dict[Any, Callable[[], Any]] = {}
        for megabytes in FITTED_MB[:2] if quick else MB_PER_RANK:
            programs |= {
                (name, megabytes): run for name, run in movement_programs(ranks, megabytes)
            }
        for (name, megabytes), seconds in fastest(programs, 2 * repeats, clock).items():
            is_fit = megabytes in FITTED_MB and (ranks != 4 or place == "processes")
            rows.append(
                {
                    "what": name,
                    "place": place,
                    "ranks": ranks,
                    "MB_per_rank": megabytes,
                    "use": FIT if is_fit else CHECK,
                    "seconds": seconds / STEPS,
                }
            )
    return rows


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
        yield name, lambda program=program: program(x, metadata)


# ---- Attention.


def measure_attention(
    repeats: int, quick: bool, clock: str
) -> Iterator[tuple[dict[str, Any], float, Callable[[Hardware], float]]]:
    for case in CASES[:2] if quick else CASES:
        programs, predictions = {}, {}
        for algorithm in ALGORITHMS:
            options, predictions[algorithm] = planned_call(case, algorithm)
            for passes, run in attention_programs(case, options).items():
                programs[algorithm, passes] = run
        for (algorithm, passes), seconds in fastest(programs, repeats, clock).items():
            row = {"what": algorithm, "place": "virtual devices", **dataclasses.asdict(case)}
            predict = functools.partial(predictions[algorithm], passes=passes)
            yield row | {"passes": passes}, seconds, predict


def planned_call(case: Case, algorithm: str) -> tuple[dict[str, Any], Callable[..., float]]:
    """Returns the options of `context_parallel_attention`, on the host, and the prediction."""
    N, K, H = HEADS[case.heads]
    lengths, ranks = case.lengths, case.ranks
    num_tokens = ranks * case.tokens_per_rank
    segment_ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]
    options: dict[str, Any] = {"algorithm": algorithm}
    moves: dict[str, Any] = {}
    if algorithm == "ring":
        options["segment_ids"] = segment_ids
    elif algorithm == "zigzag":
        order = cp.zigzag_permutation(num_tokens, ranks)
        options |= {"layout": "zigzag", "segment_ids": segment_ids[:, order]}
    elif algorithm == "balanced":
        config = cp.PlanConfig(num_heads=N, num_kv_heads=K)
        plan = cp.plan_attention(lengths=[lengths], world_size=ranks, config=config)
        options["plan"] = plan
        queries = moved(plan.q_metadata, plan.q_capacity)
        moves = {"moved_tokens": (queries, moved(plan.kv_metadata, plan.kv_capacity))}
    elif algorithm == "placed":
        placed = cp.place_tokens([lengths], world_size=ranks).plan
        options["plan"] = placed
        moves = {"placed_tokens": moved(placed.kv_metadata, placed.kv_capacity)}
    documents = (tuple(lengths),)
    workload = Workload(ranks, case.tokens_per_rank, N, K, H, itemsize=4, lengths=documents)

    def predict(hardware: Hardware, passes: str) -> float:
        both = (False,) if passes == FORWARD else (False, True)
        steps = [
            step
            for x in both
            for step in step_costs(algorithm, workload, hardware=hardware, backward=x, **moves)
        ]
        return sum(max(step.compute, step.communication) for step in steps)

    return options, predict


def attention_programs(case: Case, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    N, K, H = HEADS[case.heads]
    mesh = Mesh(np.array(jax.devices()[: case.ranks]), (AXIS,))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, AXIS)))
    rng = np.random.default_rng(0)
    shape = (1, case.ranks * case.tokens_per_rank)
    q, k, v, dout = (
        put(rng.standard_normal((*shape, heads, H), np.float32)) for heads in (N, K, K, N)
    )
    if "segment_ids" in options:
        options = options | {"segment_ids": put(options["segment_ids"])}

    def attend(q, k, v):
        return cp.context_parallel_attention(q, k, v, mesh=mesh, axis_name=AXIS, **options)

    def gradients(q, k, v, dout):
        return jax.vjp(attend, q, k, v)[1](dout)

    forward = jax.jit(attend).lower(q, k, v).compile()
    both = jax.jit(gradients).lower(q, k, v, dout).compile()
    return {FORWARD: lambda: forward(q, k, v), BOTH: lambda: both(q, k, v, dout)}


def moved(metadata: Metadata, capacity: int):
    """Returns the rows that a plan moves, as `step_costs` takes them."""
    received = np.asarray(metadata.num_recv_tokens)[:, : metadata.world_size]
    return rows_by_link(received.T, capacity=capacity)


def main() -> None:
    """Measures movement between the processes of a job."""
    arguments = common.options(common.parser(None))
    cp.initialize()
    for row in measure_movement((jax.process_count(),), arguments.repeats, arguments.quick, "wall"):
        if jax.process_index() == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
