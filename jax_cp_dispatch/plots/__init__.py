"""Draws plans, predicted times and overlap; needs the extra `plots`."""

from jax_cp_dispatch.plots.overlap import plot_overlap
from jax_cp_dispatch.plots.plan import plot_plan
from jax_cp_dispatch.plots.timeline import plot_timeline

__all__ = ["plot_overlap", "plot_plan", "plot_timeline"]
