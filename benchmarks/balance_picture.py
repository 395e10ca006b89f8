"""Draws balance.svg from the rows of `bench_balance`.

Run `python benchmarks/balance_picture.py` to redraw it from benchmarks/results/balance.json.
"""

import json
from pathlib import Path

import common


def of_cases(rows: list[dict]) -> dict[tuple[str, int], dict[str, dict]]:
    """Returns the rows of each distribution and number of ranks, by algorithm."""
    cases: dict[tuple[str, int], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["lengths"], row["world_size"]), {})[row["algorithm"]] = row
    return cases


def draw(rows: list[dict], picture: Path) -> None:
    """Draws a bar for the busiest rank of each algorithm, and a line where the mean of ranks is."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    cases = of_cases(rows)
    with plt.rc_context({"svg.hashsalt": "balance"}):
        size = {"figsize": (2.3 * len(cases), 3.3), "squeeze": False, "layout": "constrained"}
        figure, axes = plt.subplots(1, len(cases), **size)
        for axis, ((lengths, ranks), found) in zip(axes[0], cases.items(), strict=True):
            names = list(found)
            busiest, mean = (
                [found[name][key] / 1e3 for name in names] for key in ("busiest_ms", "mean_ms")
            )
            axis.bar(names, busiest, color="tab:blue", width=0.7, label="busiest rank")
            places = range(len(names))
            axis.hlines(mean, [x - 0.42 for x in places], [x + 0.42 for x in places],
                        color="black", linewidth=1.5, label="mean of ranks")  # fmt: skip
            axis.set_title(f"{lengths}, {ranks} ranks", fontsize=9)
            axis.tick_params(axis="x", labelrotation=90, labelsize=8)
            axis.tick_params(axis="y", labelsize=8)
            axis.grid(axis="y", alpha=0.3)
            axis.set_axisbelow(True)
        axes[0][0].set_ylabel("seconds", fontsize=8)
        axes[0][-1].legend(fontsize=8, frameon=False)
        title = "Attention of each rank alone, forward and backward"
        figure.suptitle(title, fontsize=10)
        figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    result = json.loads((common.ROOT / "benchmarks" / "results" / "balance.json").read_text())
    draw(result["rows"], common.ROOT / "docs" / "images" / "balance.svg")
