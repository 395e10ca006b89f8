"""Draws plans (needs the extra `plots`), cycles, the steps of ring attention, and overlap."""

from jax_cp_dispatch.plots.cycles import CyclesRow, plot_cycles
from jax_cp_dispatch.plots.overlap import plot_overlap
from jax_cp_dispatch.plots.plan import plot_plan
from jax_cp_dispatch.plots.schedules import plot_schedules

__all__ = ["CyclesRow", "plot_cycles", "plot_overlap", "plot_plan", "plot_schedules"]
