"""Draws a plan (needs the extra `plots`)."""

import pathlib
from typing import Any

import numpy as np

from jax_cp_dispatch.planner import AttentionPlan

_BEFORE, _AFTER = "#9aa5b1", "#1f77b4"


def plot_plan(plan: AttentionPlan, path: str | pathlib.Path) -> None:
    """Draws the work of each rank before and after planning, and the tokens sent between ranks.

    Args:
      plan: a concrete plan of all ranks.
      path: the file to write; its suffix selects the format.
    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_plan: needs matplotlib. Run `pip install 'jax_cp_dispatch[plots]'`."
        ) from error
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    work, queries, keys = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    _draw_work(work, plan)
    num_ranks = plan.world_size
    _draw_traffic(figure, queries, "queries", plan.q_metadata.num_recv_tokens[:, :num_ranks])
    _draw_traffic(figure, keys, "keys and values", plan.kv_metadata.num_recv_tokens[:, :num_ranks])
    figure.savefig(path, dpi=120)


def _draw_work(axes: Any, plan: AttentionPlan) -> None:
    before, after = (np.asarray(x, float) for x in (plan.pairs_before, plan.pairs_after))
    mean = max(after.mean(), 1)
    ranks = np.arange(len(before))
    label = "{}: max/mean {:.2f}"
    axes.bar(
        ranks - 0.2,
        before / mean,
        0.4,
        color=_BEFORE,
        label=label.format("before planning", float(plan.imbalance_before)),
    )
    axes.bar(
        ranks + 0.2,
        after / mean,
        0.4,
        color=_AFTER,
        label=label.format("after planning", float(plan.imbalance)),
    )
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(title="attention work", xlabel="rank", ylabel="query-key pairs / mean")
    axes.locator_params(axis="x", integer=True)
    axes.legend()


def _draw_traffic(figure: Any, axes: Any, what: str, received: Any) -> None:
    sent = np.asarray(received, float).T
    image = axes.imshow(np.where(sent > 0, sent, np.nan), cmap="viridis")
    figure.colorbar(image, ax=axes, label="tokens")
    axes.set(title=what, xlabel="to rank", ylabel="from rank")
    axes.locator_params(integer=True)
