"""Code blocks of the pages run and print the output shown; tables of ranks are computed values."""

import pathlib
import re

import numpy as np
import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
CODE = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)
CELL = re.compile(r"`(\w+)`")


@pytest.mark.parametrize("page, num_cells", [("metadata.md", 62), ("movement.md", 12)])
def test_page(page, num_cells, capsys):
    text = (DOCS / page).read_text()
    names: dict = {}
    for code, printed in CODE.findall(text):
        exec(code, names)
        assert capsys.readouterr().out == printed
    compared = 0
    owner, is_of_ranks, line_before = None, False, ""
    for line in text.splitlines():
        if line.startswith("|") and not line_before.startswith("|"):
            is_of_ranks = "| rank 0 |" in line
        line_before = line
        if not line.startswith("|") or line.startswith("|---") or not is_of_ranks:
            continue
        head, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = CELL.fullmatch(head)
        if cells[0] == "rank 0":  # if the rows are fields, the header names their object
            owner = name and names[name[1]]
            continue
        assert name, line
        value = names[name[1]] if owner is None else getattr(owner, name[1])
        assert len(cells) == len(value)
        for rank, cell in enumerate(cells):
            wanted = [sum(map(int, number.split("+"))) for number in cell.split()]
            np.testing.assert_array_equal(np.ravel(value[rank]), wanted, err_msg=line)
            compared += 1
    assert compared == num_cells
