"""Redraws swizzle.svg of ../scaling.md from the output of `swizzle_scales`."""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.plots.svg import LINE, color, document, text
from jax_cp_dispatch.scaling import swizzle_scales

ROWS, BLOCKS, BAND = 128, 4, 32  # of a tile; rows of one colour
CELL, TALL = 26, 9  # pixels of a scale, left and right
LEFT, RIGHT, TOP = 92, 330, 64
SHADES = 0.35, 0.55, 0.75, 0.95  # of the four blocks


def order() -> np.ndarray:
    """[512]: the scale of a tile, row * 4 + block, at each offset; from its two bytes."""
    scale = np.arange(ROWS * BLOCKS).reshape(ROWS, BLOCKS)
    parts = (jnp.asarray(part, jnp.uint8) for part in (scale % 256, scale // 256))
    low, high = (np.asarray(swizzle_scales(part), int).ravel() for part in parts)
    return low + 256 * high


def draw(folder: pathlib.Path) -> None:
    body = [
        text(8, 24, "scales of a tile: 128 rows of 4 blocks"),
        text(RIGHT, 24, "the same 512 bytes in memory, 16 in a line"),
        text(LEFT, 46, "block 0 … 3", font_size="11"),
        text(RIGHT, 46, "offset = row % 32 · 16 + row // 32 · 4 + block", font_size="11"),
    ]
    height = ROWS // BAND * 8 * TALL
    for row in range(ROWS):  # eight rows are drawn as one
        if row % 4:
            continue
        for block in range(BLOCKS):
            y = TOP + row * TALL / 4
            body.append(_cell(LEFT + block * CELL, y, CELL, TALL, row * BLOCKS + block))
    for band in range(ROWS // BAND):
        y = TOP + (band + 0.5) * BAND * TALL / 4 + 4
        rows = f"rows {band * BAND}–{band * BAND + BAND - 1}"
        body.append(text(8, y, rows, font_size="11"))
    tall = height / BAND
    for offset, scale in enumerate(order()):
        line, place = divmod(offset, 16)
        body.append(_cell(RIGHT + place * CELL, TOP + line * tall, CELL, tall, int(scale)))
    for line in (0, 8, 16, 24, BAND - 1):
        y = TOP + (line + 0.5) * tall + 4
        body.append(text(RIGHT + 16 * CELL + 6, y, f"offset {16 * line}", font_size="11"))
    for band in range(ROWS // BAND):
        x, y = RIGHT + (band + 0.5) * 4 * CELL, TOP + height + 16
        label = f"row {BAND * band} + line"
        body.append(text(x, y, label, font_size="11", text_anchor="middle"))
    size = RIGHT + 16 * CELL + 90, TOP + height + 30
    picture = document(*size, "The order in which tensor cores read MXFP8 scales", body)
    (folder / "swizzle.svg").write_text(picture)


def _cell(x: float, y: float, width: float, height: float, scale: int) -> str:
    """A scale: coloured by its band of rows, darker by its block."""
    row, block = divmod(scale, BLOCKS)
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    fill = f'fill="{color(row // BAND)}" fill-opacity="{SHADES[block]}"'
    return f'<rect {place} {fill} stroke="{LINE}" stroke-width="0.5"/>'


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
