"""Every example completes in a separate process and verifies its own result."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout


def test_examples_exist_and_are_short():
    assert len(EXAMPLES) >= 2
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 120, path.name
