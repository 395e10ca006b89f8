"""docs/scaling.md: its code runs, and its picture is the script's."""

import importlib.util
import pathlib
import re

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]


def test_code_blocks_run():
    page = (ROOT / "docs" / "scaling.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names: dict = {}
    for code in blocks:  # they assert what they say
        exec(code, names)
    assert len(blocks) == 5


def test_picture_is_the_one_that_the_script_draws(tmp_path):
    """From the offsets that `swizzle_scales` gives, which are those of the formula beside it."""
    path = ROOT / "docs" / "images" / "draw_swizzle.py"
    spec = importlib.util.spec_from_file_location("draw_swizzle", path)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.draw(tmp_path)
    drawn = (tmp_path / "swizzle.svg").read_text()
    assert drawn == (ROOT / "docs" / "images" / "swizzle.svg").read_text()
    row, block = np.divmod(np.arange(512), 4)
    offset = row % 32 * 16 + row // 32 * 4 + block
    np.testing.assert_array_equal(script.order()[offset], np.arange(512))
