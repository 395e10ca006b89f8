"""Tests that take long and guard a tool, a page, an example or a mode for debugging.

`.ci/run` runs them.
"""

import os

import pytest

in_ci = pytest.mark.skipif(
    os.environ.get("TESTS") != "all", reason="it takes long. Set TESTS=all, as .ci/run does"
)
