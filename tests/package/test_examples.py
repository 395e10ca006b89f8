"""Every example completes in a separate process and verifies its own result.

Compiled as for a user.
"""

import pathlib
import re
import subprocess
import sys

import pytest
from in_ci import in_ci

EXAMPLES = sorted((pathlib.Path(__file__).parents[2] / "examples").glob("*.py"))

# A short run. Its own test compares training with one device.
TRAIN = (
    *("--steps=3", "--columns=128", "--layers=1", "--workers=1"),
    *("--folder", str(EXAMPLES[0].parent)),
)


@pytest.mark.usefixtures("environment_of_a_user")
@pytest.mark.parametrize(
    "path",
    [EXAMPLES[0], *(pytest.param(path, marks=in_ci) for path in EXAMPLES[1:])],
    ids=lambda path: path.name,
)
def test_example(path, tmp_path):
    arguments = []
    if path.name == "07_train.py":
        pytest.importorskip(
            "grain", reason="the training example needs it: install the train extra"
        )
        arguments = [*TRAIN, "--out", str(tmp_path)]
    program = [sys.executable, str(path), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout


def test_examples_are_short_and_listed():
    text = (EXAMPLES[0].parent / "README.md").read_text()
    assert re.findall(r"\]\((\w+\.py)\)", text) == [path.name for path in EXAMPLES]
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 120, path.name
