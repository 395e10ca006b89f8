"""Recorded results of another implementation of Hamilton attention; tests/data names the source."""

import json
import pathlib

import numpy as np

VECTORS = pathlib.Path(__file__).parents[1] / "data" / "hamilton"


def recorded(name):
    """Returns cycles, maps, placements or a merge, by the name of the function."""
    return json.loads((VECTORS / "schedules.json").read_text())[name]


def recorded_attention(name):
    """Returns operands [B, T, N, H], the output, and each rank's part of it."""
    return dict(np.load(VECTORS / f"{name}.npz"))
