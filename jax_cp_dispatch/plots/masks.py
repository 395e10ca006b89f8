"""Draws masks: for each, the keys that every query sees."""

import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.documents.ranges import attended_tokens
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.plots.figure import COLORS, LINE, figure_class, save

_SIZE = 1.7  # inches of a mask
_COLUMNS = 5


def plot_masks(
    masks: Mapping[str, Mask], segment_ids: Int[np.ndarray, "1 T"], path: str | os.PathLike
) -> None:
    """Draws the pairs that each mask admits in one batch row: queries down, keys across.

    Args:
      masks: by title.
      segment_ids: the documents of the row; 0 is padding.
      path: the file to write; its suffix selects the format.
    Raises:
      ImportError: matplotlib is not installed.
    """
    rows = -(-len(masks) // _COLUMNS)
    figure = figure_class("plot_masks")(
        figsize=(_COLUMNS * _SIZE, rows * (_SIZE + 0.2)), layout="constrained"
    )
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for axes in panels:
        axes.axis("off")
    edges = np.flatnonzero(np.diff(segment_ids[0])) + 0.5
    for axes, (title, mask) in zip(panels, masks.items(), strict=False):
        from matplotlib.colors import ListedColormap

        axes.imshow(_pairs(mask, segment_ids), cmap=ListedColormap(["#ffffff", COLORS[0]]))
        for edge in edges:
            axes.axhline(edge, color=LINE, linewidth=0.8)
            axes.axvline(edge, color=LINE, linewidth=0.8)
        axes.axis("on")
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize=8)
    save(figure, path)


def _pairs(mask: Mask, segment_ids: np.ndarray) -> np.ndarray:
    """Returns whether each query, `[T, 1]`, sees each key, `[1, T]`, as 0 or 1."""
    packed = jax.tree.map(jnp.asarray, PackedMask(mask, segment_ids))
    ranges = jax.tree.map(np.asarray, attended_tokens(packed, segment_ids.shape))
    token = np.arange(segment_ids.shape[1])
    k_start, k_end = (x[0][:, None] for x in ranges[:2])
    seen = (k_start <= token) & (token < k_end)
    if ranges.q_start is not None:
        seen &= (ranges.q_start[0] <= token[:, None]) & (token[:, None] < ranges.q_end[0])
    return seen.astype(int)
