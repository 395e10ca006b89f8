"""What pictures say: their texts, which do not depend on the version of matplotlib."""

import pathlib
import re


def texts(path: pathlib.Path) -> list[str]:
    """Returns all texts of an SVG file that `plots.figure.save` has written, sorted."""
    found = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
    assert found, f"{path} has no texts"
    return sorted(found)
