"""Pictures: their texts, which do not depend on the version of matplotlib, and their scripts."""

import pathlib
import re
from typing import Any

from scripts import load

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"


def texts(path: pathlib.Path) -> list[str]:
    """Returns all texts of an SVG file that `plots.figure.save` has written, sorted."""
    found = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
    assert found, f"{path} has no texts"
    return sorted(found)


def drawing_script(name: str) -> Any:
    """Returns the module of docs/images that draws a picture of the documentation."""
    return load(f"docs/images/draw_{name}.py")
