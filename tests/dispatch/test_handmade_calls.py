"""Invalid handwritten custom calls raise an error; the process survives."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from handmade_calls import TARGETS, all_calls, right_result, wrong_calls

PROGRAM = pathlib.Path(__file__).with_name("handmade_calls.py")
LIMIT = 1200  # seconds until a hanging process is killed


@pytest.fixture(scope="module")
def outcomes():
    """Returns the outcomes by (target, name).

    One process makes all calls. If a call kills it, another process makes the remaining ones.
    """
    calls, found = all_calls(), []
    while len(found) < len(calls):
        ran = subprocess.run(
            [sys.executable, PROGRAM, str(len(found))],
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        found += map(json.loads, ran.stdout.splitlines())
        if ran.returncode != 0:
            found.append({"died": f"exit {ran.returncode}: {ran.stderr[-500:]}"})
    return dict(zip(calls, found, strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_valid_call(outcomes, target):
    """The control: calls below are rejected only for their one error."""
    outcome = outcomes[target, "right"]
    np.testing.assert_array_equal(outcome.get("result"), right_result(target), str(outcome))


@pytest.mark.parametrize("target, name", [call for call in all_calls() if call[1] != "right"])
def test_invalid_call(outcomes, target, name):
    outcome = outcomes[target, name]
    assert "error" in outcome, outcome
    assert wrong_calls(target)[name][1] in outcome["error"]
