"""Measures attention over virtual devices for `bench_cost_model`, and predicts it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rounds import Program, in_rounds

import jax_cp_dispatch as cp
from jax_cp_dispatch.cost import Hardware, Workload, rows_by_link, step_costs
from jax_cp_dispatch.metadata import Metadata

AXIS, PLACE = "cp", "virtual devices"
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
    Case(FIT, 8, 512, "4 heads", "18"),
    Case(FIT, 8, 512, "8 heads, 2 of keys", "1"),
    Case(FIT, 8, 1024, "2 heads of 128", "2"),
    Case(FIT, 8, 1024, "4 heads", "3"),
    Case(CHECK, 4, 1024, "4 heads", "one"),
    Case(CHECK, 4, 2048, "4 heads", "4"),
    Case(CHECK, 8, 1024, "8 heads, 2 of keys", "5"),
    Case(CHECK, 4, 1024, "2 heads of 128", "6"),
    Case(CHECK, 8, 512, "4 heads", "7"),
    Case(CHECK, 8, 512, "2 heads of 128", "12"),
    Case(CHECK, 4, 512, "8 heads, 2 of keys", "14"),
)


def measure(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields rows with the seconds of each round; every round runs all cases."""
    programs, rows = {}, {}
    for case in CASES[:2] if quick else CASES:
        for algorithm in ALGORITHMS:
            for passes, run in attention_programs(case, planned_call(case, algorithm)[0]).items():
                name = case, algorithm, passes
                programs[name] = Program(run)
                rows[name] = {"what": algorithm, "place": PLACE, **dataclasses.asdict(case)}
                rows[name] |= {"passes": passes}
    for name, times in in_rounds(programs, rounds).items():
        yield rows[name] | {"times": times}


def predicted_seconds(row: dict[str, Any], hardware: Hardware) -> float:
    """Predicts the time of a row of `measure`."""
    case = Case(**{x.name: row[x.name] for x in dataclasses.fields(Case)})
    _, moves = planned_call(case, row["what"])
    workload = Workload(
        case.ranks, case.tokens_per_rank, *HEADS[case.heads], itemsize=4,
        lengths=(tuple(case.lengths),),
    )  # fmt: skip
    steps = [
        step
        for backward in ((False,) if row["passes"] == FORWARD else (False, True))
        for step in step_costs(row["what"], workload, hardware=hardware, backward=backward, **moves)
    ]
    return sum(max(step.compute, step.communication) for step in steps)


@functools.cache
def planned_call(case: Case, algorithm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns options of `context_parallel_attention`, on the host, and those of `step_costs`."""
    N, K, _ = HEADS[case.heads]
    lengths, ranks = case.lengths, case.ranks
    segment_ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]
    if algorithm == "ring":
        return {"algorithm": algorithm, "segment_ids": segment_ids}, {}
    if algorithm == "zigzag":
        order = cp.zigzag_permutation(ranks * case.tokens_per_rank, ranks)
        ids = segment_ids[:, order]
        return {"algorithm": algorithm, "layout": "zigzag", "segment_ids": ids}, {}
    if algorithm == "placed":
        placed = cp.place_tokens([lengths], world_size=ranks).plan
        keys = moved(placed.kv_metadata, placed.kv_capacity)
        return {"algorithm": algorithm, "plan": placed}, {"placed_tokens": keys}
    config = cp.PlanConfig(num_heads=N, num_kv_heads=K)
    plan = cp.plan_attention(lengths=[lengths], world_size=ranks, config=config)
    queries = moved(plan.q_metadata, plan.q_capacity)
    keys = moved(plan.kv_metadata, plan.kv_capacity)
    return {"algorithm": algorithm, "plan": plan}, {"moved_tokens": (queries, keys)}


def moved(metadata: Metadata, capacity: int):
    """Returns the rows that a plan moves, as `step_costs` takes them."""
    received = np.asarray(metadata.num_recv_tokens)[:, : metadata.world_size]
    return rows_by_link(received.T, capacity=capacity)


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
