"""Matplotlib's figures, which all pictures are (needs the extra `plots`), and their colours."""

import os
from typing import Any

COLORS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
LINE = "#cbd2d9"


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def figure_class(op: str) -> Any:
    """Returns matplotlib's `Figure`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{op}: needs matplotlib. Run `pip install 'jax_cp_dispatch[plots]'`."
        ) from error
    return Figure


def save(figure: Any, path: str | os.PathLike) -> None:
    """Writes a figure; its suffix selects the format. Texts of SVG files stay texts."""
    import matplotlib

    metadata = {"Date": None} if os.fspath(path).lower().endswith(".svg") else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jax_cp_dispatch"}):
        figure.savefig(path, dpi=120, metadata=metadata)
