"""Pictures: their texts, which do not depend on the version of matplotlib, and their scripts."""

import importlib.util
import pathlib
import re
from typing import Any

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"


def texts(path: pathlib.Path) -> list[str]:
    """Returns all texts of an SVG file that `plots.figure.save` has written, sorted."""
    found = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
    assert found, f"{path} has no texts"
    return sorted(found)


def drawing_script(name: str) -> Any:
    """Returns the module of docs/images that draws a picture of the documentation."""
    spec = importlib.util.spec_from_file_location(name, IMAGES / f"draw_{name}.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
