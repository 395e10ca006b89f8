"""Pictures: of a plan (needs the extra `plots`), of cycles, and of the steps of a ring."""

from jax_cp_dispatch.plots.cycles import CyclesRow, plot_cycles
from jax_cp_dispatch.plots.plan import plot_plan
from jax_cp_dispatch.plots.schedules import plot_schedules

__all__ = ["CyclesRow", "plot_cycles", "plot_plan", "plot_schedules"]
