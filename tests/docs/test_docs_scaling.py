"""docs/scaling.md: its code runs."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def test_code_blocks_run():
    page = (ROOT / "docs" / "scaling.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names: dict = {}
    for code in blocks:  # the blocks contain assertions
        exec(code, names)
    assert len(blocks) == 5
