"""Runs the code blocks of a page of the documentation, in order, in one namespace."""

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)


def run_page(page: str, capsys) -> dict:
    """Returns the names that the blocks leave; what they print is what the page shows below them.

    Args:
      page: name of a file in `docs`.
      capsys: pytest's fixture.
    """
    names: dict = {}
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert blocks, page
    for code, shown in blocks:
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        assert not shown or printed == shown
    return names
