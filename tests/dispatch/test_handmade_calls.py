"""Invalid handwritten custom calls raise an error; the process survives."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from handmade_calls import TARGETS, right_result, wrong_calls

PROGRAM = pathlib.Path(__file__).with_name("handmade_calls.py")
LIMIT = 1200  # seconds until a hanging process is killed


@pytest.fixture(scope="module")
def outcomes():
    """Returns by target the outcomes of the valid call and of each invalid one.

    One process makes all calls. If a call kills it, another process makes the remaining ones.
    """

    def of(target):
        found = []
        while len(found) < 1 + len(wrong_calls(target)):
            ran = subprocess.run(
                [sys.executable, PROGRAM, target, str(len(found))],
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
            found += map(json.loads, ran.stdout.splitlines())
            if ran.returncode != 0:
                found.append({"died": f"exit {ran.returncode}: {ran.stderr[-500:]}"})
        return dict(zip(["right", *wrong_calls(target)], found, strict=True))

    return {target: of(target) for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_valid_call(outcomes, target):
    """The control: calls below are rejected only for their one error."""
    outcome = outcomes[target]["right"]
    np.testing.assert_array_equal(outcome.get("result"), right_result(target), str(outcome))


@pytest.mark.parametrize(
    "target, name", [(target, name) for target in TARGETS for name in wrong_calls(target)]
)
def test_invalid_call(outcomes, target, name):
    outcome = outcomes[target][name]
    assert "error" in outcome, outcome
    assert wrong_calls(target)[name][1] in outcome["error"]
