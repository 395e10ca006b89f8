"""Predicts (does not measure) the time of each algorithm on hardware with links.

Attention alone with 32 heads of 128 in bfloat16, on the machines of `cost.HARDWARE`. Prints the
tables, writes the numbers and draws the picture. Packed documents have log-normal lengths with
median 2048 and sigma 1.2, and fill all ranks; the last one is cut.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
from matplotlib.figure import Figure

from jax_cp_dispatch.attention.choose import candidates
from jax_cp_dispatch.cost import HARDWARE, Prediction, Workload
from jax_cp_dispatch.plots import save

MODEL = Workload(
    num_ranks=1, tokens_per_rank=1, num_heads=32, num_kv_heads=32, head_size=128, itemsize=2
)
MACHINES, RANKS = ("mi300x", "h100"), (8, 16, 64, 512)
TOKENS = tuple(2**x for x in range(9, 17))  # per rank
MODES = ("full forward", "causal forward", "causal forward+backward")
SEEDS = range(8)
COLORS = {8: "#1f77b4", 16: "#2ca02c", 64: "#ff7f0e", 512: "#d62728"}


def one_document() -> Iterator[dict[str, Any]]:
    for machine in MACHINES:
        for num_ranks in RANKS:
            for tokens in TOKENS:
                for mode in MODES:
                    workload = sized(num_ranks, tokens, mask=mode.split()[0])
                    yield {
                        "hardware": machine,
                        "ranks": num_ranks,
                        "tokens_per_rank": tokens,
                        "mode": mode,
                    } | summary(machine, workload, with_backward="backward" in mode)


def packed_documents() -> Iterator[dict[str, Any]]:
    for num_ranks in (8, 16, 64):
        for tokens in (8192, 65536):
            results = [
                predict(
                    "h100",
                    sized(num_ranks, tokens, lengths=(draw(num_ranks * tokens, seed),)),
                    with_backward=True,
                )
                for seed in SEEDS
            ]
            yield {
                "hardware": "h100",
                "ranks": num_ranks,
                "tokens_per_rank": tokens,
                "mode": MODES[-1],
                "imbalance": average(results, "imbalance"),
                "ms": {x: 1e3 * y for x, y in average(results, "total").items()},
            }


def sized(num_ranks: int, tokens: int, **changes: Any) -> Workload:
    return dataclasses.replace(MODEL, num_ranks=num_ranks, tokens_per_rank=tokens, **changes)


def draw(num_tokens: int, seed: int) -> tuple[int, ...]:
    normal = np.random.default_rng(seed).standard_normal(num_tokens // 256)
    ends = np.minimum(np.ceil(2048 * np.exp(1.2 * normal)).cumsum(), num_tokens)
    return tuple(np.diff(ends, prepend=0).astype(int).tolist())


def predict(machine: str, workload: Workload, *, with_backward: bool) -> dict[str, Prediction]:
    hardware = HARDWARE[machine]
    options = {"hardware": hardware, "with_backward": with_backward}
    return {x.label: x.predict(workload, **options) for x in candidates(workload, hardware)}


def summary(machine: str, workload: Workload, *, with_backward: bool) -> dict[str, Any]:
    predictions = predict(machine, workload, with_backward=with_backward)
    zigzag = predictions["zigzag"]
    return {
        "zigzag_compute_over_communication": rounded(zigzag.compute / zigzag.communication),
        "ms": {x: rounded(1e3 * y.total) for x, y in predictions.items()},
    }


def average(results: list[dict[str, Prediction]], field: str) -> dict[str, float]:
    return {
        x: rounded(statistics.mean(getattr(result[x], field) for result in results))
        for x in results[0]
    }


def rounded(number: float) -> float:
    return float(f"{number:.4g}")


def gain(row: dict[str, Any], algorithm: str) -> float:
    return row["ms"]["zigzag"] / row["ms"].get(algorithm, np.nan)


def tables(rows: list[dict[str, Any]], packed: list[dict[str, Any]]) -> Iterator[str]:
    others = ("ring", "hamilton", "hamilton_nodes")
    yield "**Predicted, not measured**: one causal document, forward; speed relative to zigzag."
    yield f"| hardware | ranks | tokens per rank | zigzag ms | {' | '.join(others)} |"
    yield "|---|" + "---:|" * (3 + len(others))
    for row in rows:
        if row["mode"] == MODES[1] and row["tokens_per_rank"] in (1024, 4096, 16384, 65536):
            gains = (f"{gain(row, x):.2f}" if x in row["ms"] else "" for x in others)
            sizes = f"{row['hardware']} | {row['ranks']} | {row['tokens_per_rank']}"
            yield f"| {sizes} | {row['ms']['zigzag']:.3g} | {' | '.join(gains)} |"
    names = ("ring", "zigzag", "balanced")
    yield "\n**Predicted, not measured**: packed documents, forward+backward, H100; means of 8."
    yield "| ranks | tokens per rank | imbalance: ring | zigzag | ms: ring | zigzag | balanced |"
    yield "|" + "---:|" * 7
    for row in packed:
        imbalance = (f"{row['imbalance'][x]:.2f}" for x in names[:2])
        milliseconds = (f"{row['ms'][x]:.3g}" for x in names)
        sizes = f"{row['ranks']} | {row['tokens_per_rank']}"
        yield f"| {sizes} | {' | '.join(imbalance)} | {' | '.join(milliseconds)} |"


def draw_picture(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    figure.suptitle("Predicted, not measured: Hamilton against zigzag ring, one causal document")
    by_size, by_ratio = figure.subplots(1, 2, sharey=True)
    for machine, line in zip(MACHINES, ("-", "--"), strict=True):
        for num_ranks, color in COLORS.items():
            algorithm = "hamilton" if num_ranks == 8 else "hamilton_nodes"
            chosen = [
                x
                for x in rows
                if (x["hardware"], x["ranks"], x["mode"]) == (machine, num_ranks, MODES[1])
            ]
            gains = [gain(x, algorithm) for x in chosen]
            ratios = [x["zigzag_compute_over_communication"] for x in chosen]
            style = {"color": color, "linestyle": line, "marker": ".", "linewidth": 1.5}
            nodes = "" if num_ranks == 8 else f", {num_ranks // 8} nodes"
            label = f"{num_ranks} {machine.upper()}{nodes}"
            by_size.plot([x["tokens_per_rank"] for x in chosen], gains, label=label, **style)
            by_ratio.plot(ratios, gains, **style)
    by_ratio.axvline(1.5, color="black", linewidth=0.8, linestyle="--")
    by_ratio.annotate(
        "1.5", (1.5, 0.97), (4, 0), ("data", "axes fraction"), "offset points", va="top"
    )
    by_size.set(xlabel="tokens per rank", ylabel="zigzag time / Hamilton time")
    by_size.set_xscale("log", base=2)
    by_size.set_xticks(TOKENS, [f"{x / 1024:g}K" for x in TOKENS])
    by_ratio.set(xlabel="compute / communication of the zigzag ring", xscale="log")
    common.label_log_axis(by_ratio.xaxis)
    by_size.legend()
    save(figure, path)


def main() -> None:
    arguments = common.options(common.parser(__doc__))
    rows, packed = list(one_document()), list(packed_documents())
    print("\n".join(tables(rows, packed)))
    common.write(
        arguments.output,
        "predicted, not measured: time of attention where links cost something",
        rows,
        hardware={x: dataclasses.asdict(HARDWARE[x]) for x in MACHINES},
        heads=[MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_size, MODEL.itemsize],
        packed=packed,
    )
    draw_picture(rows, arguments.pictures / "predicted_attention.svg")


if __name__ == "__main__":
    main()
