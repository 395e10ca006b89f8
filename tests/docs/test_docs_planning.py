"""The programs of the pages about plans run, with their assertions."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "page, num_blocks", [("placement.md", 5), ("balanced_attention.md", 1), ("plans.md", 3)]
)
def test_code_blocks_run(page, num_blocks):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.S)
    names: dict = {}
    for code in blocks:
        exec(code, names)
    assert len(blocks) == num_blocks
