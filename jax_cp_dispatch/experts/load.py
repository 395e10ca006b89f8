"""The load of a routing: `plot_load` draws it, `load_profile` times the experts of each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jax_cp_dispatch._arguments import check_positive, check_type
from jax_cp_dispatch._text import imbalance, known, rows_of_experts
from jax_cp_dispatch.experts.routing import Routing
from jax_cp_dispatch.plots import figure_class, save
from jax_cp_dispatch.profiling import BalanceProfile, time_ranks


def plot_load(routing: Any, path: str | os.PathLike) -> None:
    """Draws the rows of each rank as a bar of its experts, with the capacity and the need.

    Call on the host, with the routing of all ranks. Needs matplotlib: `jax_cp_dispatch[plots]`.

    Args:
      routing: from `route`.
      path: the file to write; its suffix selects the format.
    Raises:
      ImportError: matplotlib is not installed.
      TypeError, ValueError: the values are traced, or those of one rank.
    """
    op = "plot_load"
    rows = rows_of_experts(op, routing)
    need = known(op, routing.num_rows)
    ranks = np.arange(len(rows))
    figure = figure_class(op)(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    bottom = np.zeros(len(rows))
    for place, of_place in enumerate(rows.T):
        axes.bar(ranks, of_place, bottom=bottom, color=f"C{place}", edgecolor="white")
        bottom += of_place
    lost = need - bottom
    (full,) = np.nonzero(lost)
    axes.bar(full, lost[full], 0.8, bottom[full], color="none", edgecolor="black", hatch="//")
    for name, height in (("capacity", routing.capacity), ("mean", float(need.mean()))):
        axes.axhline(height, color="black", linewidth=1, linestyle="--" if name == "mean" else "-")
        axes.text(len(rows) - 0.4, height, name, va="center")
    axes.set(xlabel="rank", ylabel="rows", xticks=ranks, xlim=(-0.55, len(rows) - 0.45))
    dropped = int(known(op, routing.num_dropped).sum())
    axes.set_title(
        f"{int(rows.sum()):,} rows of {rows.size} experts; max/mean {imbalance(rows.sum(1)):.2f}; "
        f"{dropped:,} dropped",
        fontsize=10,
    )
    save(figure, path)


def load_profile(
    routing: Routing,
    compute: Callable[..., PyTree[Any]],
    *arrays: PyTree[Any],
    repeats: int = 3,
) -> BalanceProfile:
    """Times the experts of each rank of a routing, one rank after the other, on one device.

    The busiest rank determines how long a step takes. Each rank has its own `group_sizes`, and the
    same arrays. As in `balance_profile`, exchanges are not run, and on CPU seconds are processor
    time. Call outside `jit`, with the routing of all ranks.

    Args:
      routing: from `route`.
      compute: what a rank computes: `compute(group_sizes, *arrays)`, compiled once.
      arrays: those of one rank, such as its rows `[capacity, D]` and the matrices of its experts.
      repeats: rounds.
    Returns:
      The profile; its `work` are the rows of each rank.
    Raises:
      TypeError: an argument is invalid, or the values of the routing are traced.
      ValueError: an argument is invalid, or the routing is one rank's part.
    """
    op = "load_profile"
    check_type(op, "routing", routing, Routing, "Pass the result of route.")
    check_positive(op, repeats=repeats)
    rows = rows_of_experts(op, routing)
    sizes = rows.astype("int32")
    compiled, arrays = jax.jit(compute), jax.device_put(arrays)
    run = lambda rank: compiled(sizes[rank], *arrays)
    name = getattr(compute, "__name__", type(compute).__name__)
    return time_ranks([(name, run, rows.sum(1))], "rows", repeats)[0]
