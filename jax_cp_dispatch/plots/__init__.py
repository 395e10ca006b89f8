"""Draws plans, masks, predicted times, cycles, steps, and overlap; needs the extra `plots`."""

from jax_cp_dispatch.plots.cycles import CyclesRow, plot_cycles
from jax_cp_dispatch.plots.masks import plot_masks
from jax_cp_dispatch.plots.overlap import plot_overlap
from jax_cp_dispatch.plots.plan import plot_plan
from jax_cp_dispatch.plots.schedules import plot_schedules
from jax_cp_dispatch.plots.timeline import plot_timeline

__all__ = [
    "CyclesRow",
    "plot_cycles",
    "plot_masks",
    "plot_overlap",
    "plot_plan",
    "plot_schedules",
    "plot_timeline",
]
