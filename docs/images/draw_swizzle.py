"""Redraws swizzle.svg of ../scaling.md from the output of `swizzle_scales`."""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.plots import LINE, figure_class, save
from jax_cp_dispatch.scaling import swizzle_scales

ROWS, BLOCKS, BAND = 128, 4, 32  # of a tile; rows of one colour
SHADES = 0.35, 0.55, 0.75, 0.95  # of the four blocks


def order() -> np.ndarray:
    """[512]: the scale of a tile, row * 4 + block, at each offset; from its two bytes."""
    scale = np.arange(ROWS * BLOCKS).reshape(ROWS, BLOCKS)
    parts = (jnp.asarray(part, jnp.uint8) for part in (scale % 256, scale // 256))
    low, high = (np.asarray(swizzle_scales(part), int).ravel() for part in parts)
    return low + 256 * high


def draw(folder: pathlib.Path) -> None:
    figure = figure_class("draw_swizzle")(figsize=(9, 4), layout="constrained")
    tile, memory = figure.subplots(1, 2, width_ratios=(1, 3))
    scales = np.arange(ROWS * BLOCKS).reshape(ROWS, BLOCKS)
    tile.set_title("scales of a tile: 128 rows of 4 blocks", fontsize=9)
    tile.imshow(colors(scales), aspect="auto", extent=(-0.5, BLOCKS - 0.5, ROWS, 0))
    tile.set(xlabel="block", ylabel="row", xticks=range(BLOCKS), yticks=range(0, ROWS + 1, BAND))
    tile.grid(color=LINE, linewidth=0.5)
    memory.set_title("the same 512 bytes in memory, 16 in a line", fontsize=9)
    memory.imshow(colors(order().reshape(BAND, 16)), aspect="auto", extent=(0, 16, BAND, 0))
    memory.set(xlabel="offset = row % 32 · 16 + row // 32 · 4 + block", ylabel="line")
    bands = range(ROWS // BAND)
    memory.set_xticks([4 * x + 2 for x in bands], [f"row {BAND * x} + line" for x in bands])
    save(figure, folder / "swizzle.svg")


def colors(scales: np.ndarray) -> np.ndarray:
    """RGBA of scales: coloured by the band of rows, darker by the block."""
    from matplotlib.colors import to_rgb

    row, block = np.divmod(scales, BLOCKS)
    rgb = np.array([to_rgb(f"C{x}") for x in range(ROWS // BAND)])
    return np.concatenate([rgb[row // BAND], np.array(SHADES)[block][..., None]], -1)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
