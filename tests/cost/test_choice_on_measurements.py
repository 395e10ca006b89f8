"""The choice of `choose_algorithm` on the committed measurements, compared with the best one.

The times are in `benchmarks/results`: of calls over virtual devices, which share the cores; and
of each rank alone, whose busiest one decides, if links take no time. `training.json` has no
document lengths, so nothing can be chosen for it.
"""

import json
import pathlib
import statistics
from typing import Any, NamedTuple

import numpy as np
import pytest

from jax_cp_dispatch import Ulysses, choose_algorithm
from jax_cp_dispatch.cost import HARDWARE, Hardware

ROOT = pathlib.Path(__file__).parents[2]
CPU = HARDWARE["cpu"]
ALGORITHMS = ("ring", "zigzag", "hamilton", "balanced", "placed")
# Ranks that have a core each, at the rates of attention on a CPU.
FREE_LINKS = Hardware(
    matmul_flops=CPU.matmul_flops,
    link_bandwidth=float("inf"),
    link_latency=0.0,
    topology="nvswitch",
    attention_flops=CPU.attention_flops,
    planned_attention_flops=CPU.planned_attention_flops,
)
EIGHT_HEADS = {"num_heads": 8, "num_kv_heads": 8, "head_size": 64}


class Measured(NamedTuple):
    """The times of the algorithms for one input of `choose_algorithm`."""

    name: str
    options: dict[str, Any]
    ms: dict[str, float]
    ranks_share_cores: bool = True

    def of_best(self) -> float:
        hardware = CPU if self.ranks_share_cores else FREE_LINKS
        name = choose_algorithm(**self.options, hardware=hardware).algorithm.name
        return self.ms[name] / min(self.ms.values())


def rows(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]


def published(name, num_tokens):
    """The documents of the first batch of the smallest sufficient size; the last one is cut."""
    batches = json.loads((ROOT / f"tests/data/lengths/dist_{name}.json").read_text())
    size = min(x["tokens"] for x in batches if x["tokens"] >= num_tokens)
    (lengths, *_) = (x["lengths"] for x in batches if x["tokens"] == size)
    ends = np.minimum(np.cumsum(lengths), num_tokens)
    counts = np.diff(ends, prepend=0)
    return [counts[counts > 0].tolist()]


def by_case(found, key, algorithm, milliseconds):
    """Yields each case, and the times of its algorithms."""
    cases: dict[tuple, dict[str, float]] = {}
    for row in found:
        if row[algorithm] in ALGORITHMS:
            cases.setdefault(tuple(row[x] for x in key), {})[row[algorithm]] = milliseconds(row)
    yield from cases.items()


def from_choice():
    for row in rows("choice"):
        names = ("num_ranks", "tokens_per_rank", "num_heads", "num_kv_heads", "head_size")
        options = {x: row[x] for x in names} | {"lengths": [row["lengths"]], "itemsize": 4}
        options |= {"can_place": True, "with_backward": row["passes"] != "forward"}
        where = f"{row['num_ranks']} ranks, {row['num_heads']} heads, {len(row['lengths'])} doc"
        yield Measured(f"{where}, {row['passes']}", options, row["ms"])


def from_attention():
    key = ("case", "dtype", "tokens")
    for (case, dtype, tokens), ms in by_case(rows("attention"), key, "method", lambda x: x["ms"]):
        packed = case.startswith("packed")
        assert not packed or case == "packed, dist_wlbllm.json"
        options: Any = {"num_ranks": 8, "tokens_per_rank": tokens // 8, **EIGHT_HEADS}
        options["itemsize"] = 4 if dtype == "float32" else 2
        options["mask"] = "full" if case == "full" else "causal"
        options["lengths"] = published("wlbllm", tokens) if packed else None
        yield Measured(f"{case}, {dtype}", options, ms)


def from_growth():
    milliseconds = lambda row: 1e3 * row["s"]
    cases = by_case(rows("attention_growth"), ("tokens",), "method", milliseconds)
    for (tokens,), ms in cases:
        options = {"num_ranks": 8, "tokens_per_rank": tokens // 8, "itemsize": 4, **EIGHT_HEADS}
        yield Measured(f"{tokens} tokens", options | {"lengths": None}, ms)


def from_balance():
    sizes = ("num_heads", "num_kv_heads", "head_size")
    key = ("lengths", "world_size", "tokens_per_rank", *sizes)
    cases = by_case(rows("balance"), key, "algorithm", lambda row: row["busiest_ms"])
    for (lengths, num_ranks, tokens, *heads), ms in cases:
        options = {"num_ranks": num_ranks, "tokens_per_rank": tokens, "itemsize": 4}
        options |= dict(zip(sizes, heads, strict=True)) | {"can_place": True}
        options |= {"lengths": published(lengths, num_ranks * tokens)}
        yield Measured(f"{lengths}, {num_ranks} ranks", options, ms, ranks_share_cores=False)


MEASURED = [*from_choice(), *from_attention(), *from_growth(), *from_balance()]


@pytest.fixture(autouse=True)
def without_ulysses(monkeypatch):
    """It is not among the measurements; the choice is among the others."""
    monkeypatch.setattr(Ulysses, "candidates", lambda *_, **__: ())


def test_the_choice_is_nearly_the_best():
    ratios = [measured.of_best() for measured in MEASURED]
    assert len(ratios) >= 39
    assert statistics.mean(ratios) <= 1.03
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    assert ratios[worst] <= 1.10, MEASURED[worst].name
