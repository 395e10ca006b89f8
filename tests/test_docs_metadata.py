"""The numbers of docs/metadata.md: its code blocks run, every cell of its tables is compared."""

import pathlib
import re

import numpy as np

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "metadata.md"
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
CELL = re.compile(r"`(\w+)`")


def test_page():
    text = PAGE.read_text()
    names: dict = {}
    for block in CODE.findall(text):
        exec(block, names)
    compared = 0
    owner = None
    for line in text.splitlines():
        if not line.startswith("|") or line.startswith("|---"):
            continue
        head, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = CELL.fullmatch(head)
        if cells[0] == "rank 0":  # the header names the object, if the rows are its fields
            owner = name and names[name[1]]
            continue
        assert name, line
        value = names[name[1]] if owner is None else getattr(owner, name[1])
        assert len(cells) == len(value)
        for rank, cell in enumerate(cells):
            np.testing.assert_array_equal(
                np.ravel(value[rank]), [int(x) for x in cell.split()], err_msg=line
            )
            compared += 1
    assert compared > 50
