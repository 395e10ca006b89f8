"""Draws cycles.svg and schedules.svg, the pictures of ../choose_an_algorithm.md, again."""

import pathlib
import sys

from jax_cp_dispatch.cycles import hamiltonian_cycles, two_level_cycles
from jax_cp_dispatch.plots import CyclesRow, plot_cycles, plot_schedules


def draw(folder: pathlib.Path) -> None:
    rails = two_level_cycles(4, 2, rail_aligned=True)
    rows = [
        CyclesRow("K₅: 5 ranks, 4 chunks, and all together", hamiltonian_cycles(5)),
        CyclesRow("K₈: 8 ranks, 7 chunks", hamiltonian_cycles(8)),
        CyclesRow("4-K₄-4: 2 nodes of 4 ranks, 4 chunks", two_level_cycles(4, 2), nodes=2),
        CyclesRow("the same, aligned to rails", rails, nodes=2),
    ]
    plot_cycles(rows, folder / "cycles.svg")
    plot_schedules(5, folder / "schedules.svg")


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
