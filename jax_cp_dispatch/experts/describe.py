"""Describes a routing for people, and draws its load."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from jaxtyping import Int64

from jax_cp_dispatch._text import RANKS_HEADER, count, rank_table, table
from jax_cp_dispatch.metadata.fields import describe_traffic, known, rows_between_ranks, rows_moved
from jax_cp_dispatch.plots import color, figure_class, save


def rows_of_experts(op: str, routing: Any) -> Int64[np.ndarray, "W L"]:
    """Returns the rows of each expert of each rank.

    Raises:
      TypeError: the values are traced.
      ValueError: it is one rank's part.
    """
    rows_between_ranks(op, routing)  # of all ranks?
    return known(op, routing.group_sizes).reshape(routing.world_size, -1).astype(np.int64)


def describe_routing(op: str, routing: Any) -> str:
    """Returns the text of `Routing.describe`."""
    rows = rows_of_experts(op, routing)
    num_ranks, num_places = rows.shape
    num_tokens, num_choices = routing.row.shape
    sent, load = rows_between_ranks(op, routing), rows.sum(1)
    need = known(op, routing.num_rows).astype(np.int64)
    dropped, all_rows = int(known(op, routing.num_dropped).sum()), int(need.sum())
    own, moved = np.diag(sent), rows_moved(sent)
    per_token = moved / max(num_tokens, 1)
    lines = [
        f"Routing: {num_ranks} ranks of {num_places} experts, {count(num_tokens)} tokens of "
        f"{num_choices} choices",
        f"  rows      {count(load.sum())} for experts; max/mean {_imbalance(load):.3f} of the "
        f"ranks (rank {load.argmax()}), {_imbalance(rows):.3f} of the experts (place "
        f"{rows.argmax()})",
        f"  capacity  at most {count(need.max())} rows needed on rank {need.argmax()}; "
        f"{need.max() / routing.capacity:.0%} of {count(routing.capacity)}",
        f"  dropped   {count(dropped)} choices ({dropped / max(all_rows, 1):.1%})",
        f"  tokens    {count(moved)} move to another rank ({per_token:.3f} per token), where they "
        f"have {load.sum() / max(int(sent.sum()), 1):.3f} rows each",
        "",
        table(
            RANKS_HEADER,
            rank_table(
                {
                    "rows of experts": load,
                    "rows needed": need,
                    "tokens kept": own,
                    "tokens sent to others": sent.sum(1) - own,
                    "tokens received from others": sent.sum(0) - own,
                }
            ),
        ),
        "",
        describe_traffic("tokens", sent),
    ]
    return "\n".join(lines)


def _imbalance(load: Any) -> float:
    return float(load.max() / load.mean()) if load.any() else 1.0


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
        axes.bar(ranks, of_place, bottom=bottom, color=color(place), edgecolor="white")
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
        f"{int(rows.sum()):,} rows of {rows.size} experts; max/mean {_imbalance(rows.sum(1)):.2f}; "
        f"{dropped:,} dropped",
        fontsize=10,
    )
    save(figure, path)
