"""Benchmarks that only continuous integration runs: they compile for long."""

import os

import pytest

if_measured = pytest.mark.skipif(
    os.environ.get("BENCHMARKS") != "all", reason="it takes long. Set BENCHMARKS=all, as .ci/run"
)
