"""The program of docs/sequence.md runs."""

import pathlib
import re

import jax

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "sequence.md"


def test_page_runs():
    assert jax.device_count() == 8
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S))
    exec(compile(code, str(PAGE), "exec"), {})
