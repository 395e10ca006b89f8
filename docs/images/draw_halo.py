"""Redraws halo.svg of ../windows.md: the keys that each rank holds, its own and those around."""

import pathlib
import sys
from typing import Any

from jax_cp_dispatch.attention.algorithms.planned import HeldRows
from jax_cp_dispatch.documents.layouts import contiguous_layout, zigzag_layout
from jax_cp_dispatch.plots import LINE, figure_class, save

_RANKS, _TOKENS, _REACH = 4, 12, 4  # tokens of a rank; keys before its own that a query sees


def draw(folder: pathlib.Path) -> None:
    """Draws a line of the sequence for each rank: keys in the colour of the rank they come from."""
    figure = figure_class("draw_halo")(figsize=(8, 3), layout="constrained")
    panels = figure.subplots(2, 1)
    layouts = {"packed order": contiguous_layout, "zigzag order": zigzag_layout}
    for axes, (title, make) in zip(panels, layouts.items(), strict=True):
        layout = make(_RANKS, _TOKENS)
        axes.set_title(f"{title}: {_RANKS} ranks, a window of {_REACH + 1}", loc="left", fontsize=9)
        owners = [
            (start, start + length, rank)
            for rank, blocks in enumerate(layout.blocks)
            for start, length in blocks
        ]
        for receiver, parts in enumerate(HeldRows(layout, _REACH, 0).parts()):
            for low, high in parts:
                for start, end, owner in owners:
                    first, last = max(low, start), min(high, end)
                    if first < last:
                        _bar(axes, receiver, owner, first, last - first)
        axes.set(xlim=(0, layout.num_tokens), ylim=(_RANKS - 0.5, -0.5), xticks=[])
        axes.set_yticks(range(_RANKS), [f"rank {rank}" for rank in range(_RANKS)], fontsize=8)
        for side in axes.spines.values():
            side.set_edgecolor(LINE)
    save(figure, folder / "halo.svg")


def _bar(axes: Any, receiver: int, owner: int, first: int, tokens: int) -> None:
    """A rank's own keys fill its line; those that it receives are hatched."""
    is_own = owner == receiver
    axes.barh(
        receiver, tokens, 0.8 if is_own else 0.4, first, color=f"C{owner}",
        hatch=None if is_own else "////", edgecolor="#ffffff", linewidth=0.5,
    )  # fmt: skip


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
