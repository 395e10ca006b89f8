"""Recorded results of another implementation of Hamilton attention, where these are present."""

import json
import pathlib

import pytest

VECTORS = pathlib.Path(__file__).parents[2] / "shared" / "vectors" / "hamilton"
needs_vectors = pytest.mark.skipif(
    not VECTORS.is_dir(),
    reason=f"the recorded vectors are not at {VECTORS}, they are no part of the package",
)


def recorded(name):
    return json.loads((VECTORS / f"{name}.json").read_text())
