"""Every example completes in a separate process and verifies its own result.

Large programs compile as the suite does, the others as for a user.
"""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[2] / "examples").glob("*.py"))
LARGE = ("02", "03", "04", "06", "07", "08", "10")

# A short run. Its own test compares training with one device.
TRAIN = (
    "--steps=3",
    "--columns=128",
    "--layers=1",
    "--workers=1",
    "--folder",
    str(EXAMPLES[0].parent),
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path, tmp_path, request):
    if path.name[:2] not in LARGE:
        request.getfixturevalue("environment_of_a_user")
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


def test_examples_exist_and_are_short():
    assert len(EXAMPLES) >= 2
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 120, path.name
