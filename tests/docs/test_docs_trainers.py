"""docs/trainers.md: its code runs, and gives what it says."""

import pathlib
import re

import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "trainers.md").read_text()


def test_code_blocks_run():
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    for code in blocks:
        if "import equinox" in code:
            pytest.importorskip("equinox", reason="its block needs it: install the test extra")
        exec(code, names)
    assert len(blocks) == 3
