"""Counts what windows move and compute, by the halo and by others, and measures halo beside ring.

Counted, of documents of published lengths: windows of 512 and 4096 over 8 ranks, one layer; and a
model of 8 layers without a window and 40 with one of 512, of 262,144 tokens over 4 ranks
(marin-community/marin#9119). Measured: one document over 8 virtual devices, in zigzag order.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import common
import jax
import numpy as np
from attention_programs import AXIS, HEAD_SIZE, NUM_HEADS, NUM_RANKS, mesh
from bench_models import BOTH, FORWARD, both_passes
from jax.sharding import NamedSharding, PartitionSpec as P
from peer_placements import HEADS

from jax_cp_dispatch import (
    Balanced,
    Documents,
    Halo,
    Placed,
    Ring,
    Zigzag,
    context_parallel_attention as attend,
    place_tokens,
)
from jax_cp_dispatch.attention import Algorithm
from jax_cp_dispatch.attention.algorithms.planned import moves_of_plan
from jax_cp_dispatch.cost import HARDWARE, Workload, rank_pairs
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.masks import Causal, SlidingWindow, StaticMask

LENGTHS, WINDOWS = ("wlbllm", "prolong"), (512, 4096)
TOKENS = 65536  # of a rank
MODEL: dict[StaticMask, int] = {Causal(): 8, SlidingWindow(512): 40}  # layers of each mask
H100 = HARDWARE["h100"]


def documents(name: str, num_ranks: int) -> list[int]:
    """Returns the committed batch of 8 ranks, cut to fewer."""
    path = common.ROOT / "tests" / "data" / "packed" / f"{name}.json"
    lengths = next(x["lengths"] for x in json.loads(path.read_text()) if x["ranks"] == NUM_RANKS)
    ends = np.minimum(np.cumsum(lengths), num_ranks * TOKENS)
    cut = np.diff(ends, prepend=0)
    return cut[cut > 0].tolist()


class Layer(NamedTuple):
    """One layer, forward and backward.

    Attributes:
      steps: with an exchange, of both passes.
      sent, most: bytes that a rank sends, on average; that the busiest one sends or receives.
      pairs: query-key pairs of each rank.
    """

    steps: int
    sent: float
    most: float
    pairs: np.ndarray

    def row(self) -> dict[str, Any]:
        work = float(self.pairs.max() / self.pairs.mean())
        busiest = self.most / self.sent if self.sent else 1.0
        return {"steps": self.steps, "MB": round(self.sent / 1e6, 2),
                "busiest": round(busiest, 2), "work": round(work, 3)}  # fmt: skip


def layer(algorithm: Algorithm, workload: Workload, *, zigzag: bool = False, plan=None) -> Layer:
    options: Any = {"hardware": H100, "moves": moves_of_plan(plan, H100)}
    steps = [
        s
        for back in (False, True)
        for s in algorithm.step_costs(workload, backward=back, **options)
    ]
    pairs = None if plan is None else np.array(plan.pairs)
    if pairs is None:
        sizes: Any = {"num_ranks": workload.num_ranks, "tokens_per_rank": TOKENS}
        pairs = rank_pairs(workload.rows[0], mask=workload.mask, zigzag=zigzag, **sizes).sum(1)
    return Layer(
        sum(s.sent_bytes > 0 for s in steps),
        sum(s.sent_bytes for s in steps),
        sum(s.most_inside for s in steps),
        pairs,
    )


def counted(lengths: Sequence[int], num_ranks: int, layers: dict[StaticMask, int]):
    """Yields each way to attend these layers, and the sum of them."""
    of = lambda mask: Workload(
        num_ranks, TOKENS, **HEADS, itemsize=2, lengths=(tuple(lengths),), mask=mask
    )
    sizes: Any = {"world_size": num_ranks, "columns": num_ranks * TOKENS}
    placement = place_tokens(
        [list(lengths)], **sizes, masks=tuple(layers), layers=tuple(layers.values())
    )
    plans = dict(zip(layers, placement.plans, strict=True))
    is_window = lambda mask: None not in mask.reach

    def by_halo(mask: StaticMask, zigzag: bool) -> Layer:
        ring = Zigzag() if zigzag else Ring()
        halo = Halo("zigzag" if zigzag else "contiguous")
        return layer(halo if is_window(mask) else ring, of(mask), zigzag=zigzag)

    ways = {
        "halo, zigzag order": partial(by_halo, zigzag=True),
        "halo, packed order": partial(by_halo, zigzag=False),
        "rings, zigzag order": lambda mask: layer(Zigzag(), of(mask), zigzag=True),
        "balanced": lambda mask: layer(
            Balanced(), of(mask), plan=Balanced().plan_for(of(mask), H100)
        ),
        "one placement": lambda mask: layer(Placed(), of(mask), plan=plans[mask]),
    }
    for way, of_mask in ways.items():
        each = [(number, of_mask(mask)) for mask, number in layers.items()]
        total: Any = (sum(n * x[i] for n, x in each) for i in range(len(Layer._fields)))
        yield {"way": way, **Layer(*total).row()}


def counts() -> Iterator[dict[str, Any]]:
    for name, window in itertools.product(LENGTHS, WINDOWS):
        what = f"window {window}, {name}"
        layers: dict[StaticMask, int] = {SlidingWindow(window): 1}
        yield from ({"what": what, **x} for x in counted(documents(name, 8), 8, layers))
    for name in LENGTHS:
        what = f"8 + 40 layers, {name}"
        yield from ({"what": what, **x} for x in counted(documents(name, 4), 4, MODEL))


def times(tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the times of halo and of the ring, both in zigzag order, interleaved."""
    rng = np.random.default_rng(0)
    put = lambda x: jax.device_put(x, NamedSharding(mesh(), P(None, AXIS)))
    shape = (1, NUM_RANKS * tokens, NUM_HEADS, HEAD_SIZE)
    arrays = [put(rng.standard_normal(shape, np.float32)) for _ in range(4)]
    stored = Documents(np.ones(shape[:2], np.int32)).zigzag(NUM_RANKS)
    options = {"mesh": mesh(), "axis_name": AXIS, "documents": stored}
    runs = {}
    for window, algorithm in itertools.product(WINDOWS, ("halo", "zigzag")):
        mask = SlidingWindow(window)
        call = partial(attend, algorithm=algorithm, mask=mask, **options)
        runs |= both_passes(f"{algorithm} {window} ", call, *arrays)
    seconds = common.interleaved(runs, repeats)
    for window, passes in itertools.product(WINDOWS, (FORWARD, BOTH)):
        halo, ring = (seconds[f"{x} {window} {passes}"] for x in ("halo", "zigzag"))
        row = {"window": window, "passes": passes, "tokens": tokens, "ms": round(1e3 * halo, 1)}
        yield row | {"ring_ms": round(1e3 * ring, 1), "of_ring": round(halo / ring, 3)}


def main() -> None:
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--tokens", type=int, default=2048, help="of a device, to measure")
    arguments = common.options(parser, tokens=256)
    start_cpu_devices(NUM_RANKS)
    rows = []
    for row in itertools.chain(counts(), times(arguments.tokens, arguments.repeats)):
        rows.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    title = f"{HEADS['num_kv_heads']} KV heads of {HEADS['head_size']} in bfloat16"
    common.write(arguments.output, title, rows)


if __name__ == "__main__":
    main()
