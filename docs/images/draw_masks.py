"""Redraws masks.svg of ../masks.md, from the examples of that page."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.documents.documents import attended_tokens, trusted
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.plots import LINE, figure_class, save

_SIZE = 1.7  # inches of a mask
_COLUMNS = 5


def draw(folder: pathlib.Path) -> None:
    """Draws the pairs that each mask of the page admits: queries down, keys across."""
    names: dict = {}
    page = pathlib.Path(__file__).parents[1] / "masks.md"
    exec(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)[0], names)
    masks, segment_ids = names["examples"], names["ids"]
    rows = -(-len(masks) // _COLUMNS)
    figure = figure_class("draw_masks")(
        figsize=(_COLUMNS * _SIZE, rows * (_SIZE + 0.2)), layout="constrained"
    )
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for axes in panels:
        axes.axis("off")
    edges = np.flatnonzero(np.diff(segment_ids[0])) + 0.5
    for axes, (title, mask) in zip(panels, masks.items(), strict=False):
        from matplotlib.colors import ListedColormap

        axes.imshow(_pairs(mask, segment_ids), cmap=ListedColormap(["#ffffff", "C0"]))
        for edge in edges:
            axes.axhline(edge, color=LINE, linewidth=0.8)
            axes.axvline(edge, color=LINE, linewidth=0.8)
        axes.axis("on")
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize=8)
    save(figure, folder / "masks.svg")


def _pairs(mask: Mask, segment_ids: np.ndarray) -> np.ndarray:
    """Returns whether each query, `[T, 1]`, sees each key, `[1, T]`, as 0 or 1."""
    packed = jax.tree.map(jnp.asarray, trusted(segment_ids, mask=mask))
    ranges = jax.tree.map(np.asarray, attended_tokens(packed, segment_ids.shape))
    token = np.arange(segment_ids.shape[1])
    k_start, k_end = (x[0][:, None] for x in ranges[:2])
    seen = (k_start <= token) & (token < k_end)
    if ranges.q_start is not None:
        seen &= (ranges.q_start[0] <= token[:, None]) & (token[:, None] < ranges.q_end[0])
    return seen.astype(int)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
