"""A picture of each section: speeds relative to the limit and to the alternative."""

import pathlib
from collections.abc import Sequence

from jax_cp_dispatch.bench_command.ranks import Row
from jax_cp_dispatch.plots.plan import figure_class

_RATIOS = {"of_limit": "fraction of the limit", "speedup": "times as fast as the alternative"}


def check_folder(folder: pathlib.Path) -> None:
    """Creates the folder.

    Raises:
      ImportError: matplotlib is not installed.
      OSError: the folder cannot be created.
    """
    figure_class("--pictures")
    folder.mkdir(parents=True, exist_ok=True)


def draw(rows: Sequence[Row], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws `SECTION.png` for each section that has ratios; returns the files."""
    Figure = figure_class("--pictures")
    paths = []
    for section in dict.fromkeys(row.section for row in rows):
        chosen = [row for row in rows if row.section == section]
        shown = {name: [r for r in chosen if getattr(r, name)] for name in _RATIOS}
        shown = {name: found for name, found in shown.items() if found}
        if not shown:
            continue
        height = 1 + 0.3 * max(map(len, shown.values()))
        figure = Figure(figsize=(6.5 * len(shown), height), layout="constrained")
        for axes, (name, found) in zip(
            figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True
        ):
            places = range(len(found))
            axes.barh(places, [getattr(row, name) for row in found], color="#1f77b4")
            axes.set_yticks(places, [row.what for row in found])
            axes.invert_yaxis()
            axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
            axes.set(
                title=f"{section}: {_RATIOS[name]}", xscale="log" if name == "speedup" else "linear"
            )
        paths.append(folder / f"{section}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths
