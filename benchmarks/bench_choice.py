"""Measures the algorithms that `choose_algorithm` chooses from, and how good its choice is.

Float32 over virtual devices, which share the cores; forward, and forward and backward. For "zigzag"
and "placed", the tokens are in that order before the call. Times are interleaved medians.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import common
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cp
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.tools.programs import make_segment_ids

AXIS, RANKS = "cp", (4, 8)
FORWARD, BOTH = "forward", "forward and backward"
ALGORITHMS = ("ring", "zigzag", "ulysses", "balanced", "placed")


class Case(NamedTuple):
    """Shapes of a call, and its documents: one, or log-normal lengths of a seed."""

    num_ranks: int
    tokens_per_rank: int
    heads: tuple[int, int, int]  # of queries, of keys, size
    seed: int | None

    @property
    def lengths(self) -> list[int]:
        num_tokens = self.num_ranks * self.tokens_per_rank
        if self.seed is None:
            return [num_tokens]
        normal = np.random.default_rng(self.seed).standard_normal(num_tokens)
        ends = np.minimum(np.ceil(512 * np.exp(normal)).cumsum(), num_tokens).astype(int)
        lengths = np.diff(ends, prepend=0)
        return lengths[lengths > 0].tolist()

    @property
    def sizes(self) -> dict[str, Any]:
        names = ("num_heads", "num_kv_heads", "head_size")
        sizes = {"num_ranks": self.num_ranks, "tokens_per_rank": self.tokens_per_rank}
        return sizes | dict(zip(names, self.heads, strict=True))

    @property
    def algorithms(self) -> list[str]:
        """Those that take the case."""
        shares_heads = self.heads[0] % self.num_ranks == 0
        return [x for x in ALGORITHMS if x != "ulysses" or shares_heads]


CASES = (
    Case(8, 512, (4, 4, 64), None),
    Case(8, 512, (4, 4, 64), 18),
    Case(8, 512, (8, 2, 64), 1),
    Case(8, 1024, (2, 2, 128), 2),
    Case(8, 1024, (4, 4, 64), 3),
    Case(4, 1024, (4, 4, 64), None),
    Case(4, 2048, (4, 4, 64), 4),
    Case(8, 1024, (8, 2, 64), 5),
    Case(4, 1024, (2, 2, 128), 6),
    Case(8, 512, (4, 4, 64), 7),
    Case(8, 512, (2, 2, 128), 12),
    Case(4, 512, (8, 2, 64), 14),
)


def call_options(case: Case, algorithm: str) -> dict[str, Any]:
    """Returns the options of `context_parallel_attention`; plans are made on the host."""
    if algorithm == "placed":
        placement = cp.place_tokens([case.lengths], world_size=case.num_ranks)
        return {"documents": placement.documents}
    ids = make_segment_ids(case.lengths)
    if algorithm == "balanced":
        config = cp.PlanConfig(num_heads=case.heads[0], num_kv_heads=case.heads[1])
        options = {"world_size": case.num_ranks, "config": config}
        plan = cp.plan_attention(lengths=[case.lengths], **options)
        return {"documents": cp.Documents(ids).with_plan(plan)}
    if algorithm in ("ring", "ulysses"):
        return {"segment_ids": ids}
    return {"documents": cp.Documents(ids).zigzag(case.num_ranks)}


def programs(case: Case, algorithm: str) -> dict[str, Callable[[], Any]]:
    """Returns the compiled program of each pass."""
    N, K, H = case.heads
    mesh = Mesh(np.array(jax.devices()[: case.num_ranks]), (AXIS,))
    sharding = lambda spec: NamedSharding(mesh, spec)
    put = lambda x: jax.device_put(x, sharding(P(None, AXIS)))
    rng = np.random.default_rng(0)
    shape = (1, case.num_ranks * case.tokens_per_rank)
    q, k, v, dout = (
        put(rng.standard_normal((*shape, heads, H), np.float32)) for heads in (N, K, K, N)
    )
    options: dict[str, Any] = call_options(case, algorithm) | {"algorithm": algorithm}
    if "segment_ids" in options:
        options["segment_ids"] = put(options["segment_ids"])
    else:
        documents = options["documents"]
        shardings = jax.tree.map(sharding, documents.specs(AXIS))
        options["documents"] = jax.device_put(documents, shardings)

    def attend(q, k, v):
        return cp.context_parallel_attention(q, k, v, mesh=mesh, axis_name=AXIS, **options)

    def gradients(q, k, v, dout):
        return jax.vjp(attend, q, k, v)[1](dout)

    forward = jax.jit(attend).lower(q, k, v).compile()
    both = jax.jit(gradients).lower(q, k, v, dout).compile()
    return {FORWARD: lambda: forward(q, k, v), BOTH: lambda: both(q, k, v, dout)}


def measure(cases: tuple[Case, ...], repeats: int) -> Iterator[dict[str, Any]]:
    runs = {
        f"{case}, {passes}, {algorithm}": run
        for case in cases
        for algorithm in case.algorithms
        for passes, run in programs(case, algorithm).items()
    }
    seconds = common.interleaved(runs, repeats)
    for case in cases:
        for passes in (FORWARD, BOTH):
            found = {x: seconds[f"{case}, {passes}, {x}"] for x in case.algorithms}
            ms = {x: float(f"{1e3 * second:.4g}") for x, second in found.items()}
            options = case.sizes | {"itemsize": 4, "can_place": True}
            choice = cp.choose_algorithm(
                [case.lengths], **options, with_backward=passes == BOTH
            ).algorithm.name
            yield {
                **case.sizes,
                "lengths": case.lengths,
                "passes": passes,
                "ms": ms,
                "chosen": choice,
                "of_best": round(ms[choice] / min(ms.values()), 3) if choice in ms else None,
            }


def main() -> None:
    parser = common.parser(__doc__, repeats=9)
    arguments = common.options(parser)
    start_cpu_devices(max(RANKS))
    rows = []
    for row in measure(CASES[:2] if arguments.quick else CASES, arguments.repeats):
        rows.append(row)
        print(json.dumps(row), flush=True)
    common.write(arguments.output, "algorithms of attention, and the choice of one", rows)


if __name__ == "__main__":
    main()
