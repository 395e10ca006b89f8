"""docs/scaling.md: its code runs, and its picture is current."""

import importlib.util
import pathlib
import re

import numpy as np
from pictures import texts

ROOT = pathlib.Path(__file__).parents[2]


def test_code_blocks_run():
    page = (ROOT / "docs" / "scaling.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names: dict = {}
    for code in blocks:  # the blocks contain assertions
        exec(code, names)
    assert len(blocks) == 5


def test_picture_matches_the_script(tmp_path):
    """The offsets that `swizzle_scales` gives equal those of the formula next to the picture."""
    path = ROOT / "docs" / "images" / "draw_swizzle.py"
    spec = importlib.util.spec_from_file_location("draw_swizzle", path)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.draw(tmp_path)
    assert texts(tmp_path / "swizzle.svg") == texts(ROOT / "docs" / "images" / "swizzle.svg")
    row, block = np.divmod(np.arange(512), 4)
    offset = row % 32 * 16 + row // 32 * 4 + block
    np.testing.assert_array_equal(script.order()[offset], np.arange(512))
