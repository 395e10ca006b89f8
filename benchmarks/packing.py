"""Packed documents with published lengths (tests/data) or log-normal lengths."""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
from common import ROOT

from jax_cp_dispatch.tools.programs import MEDIAN, SIGMA, drawn_lengths, make_segment_ids

DRAWN = f"log-normal, median {MEDIAN}, sigma {SIGMA}"
TOKENS_PER_RANK = 65536  # of `packed`
MOST_PUBLISHED = 512  # ranks; lengths of more are drawn
PUBLISHED = ROOT / "tests" / "data" / "lengths"


def published(path: pathlib.Path, num_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields seed and segment ids [1, num_tokens] of each batch of the smallest sufficient size."""
    batches = [batch for batch in json.loads(path.read_text()) if batch["tokens"] >= num_tokens]
    if not batches:
        raise ValueError(f"{path} has no batch of {num_tokens} tokens. Pass fewer tokens.")
    size = min(batch["tokens"] for batch in batches)
    for batch in batches:
        if batch["tokens"] == size:
            yield batch["seed"], make_segment_ids(batch["lengths"], num_tokens)


def packed(world_sizes: list[int]) -> Iterator[tuple[str, int, list[int]]]:
    """Yields distribution, ranks and lengths of batches, of tests/data/packed and drawn ones."""
    for path in sorted((ROOT / "tests" / "data" / "packed").glob("*.json")):
        for batch in json.loads(path.read_text()):
            if batch["ranks"] in world_sizes:
                yield path.stem, batch["ranks"], batch["lengths"]
    for world_size in world_sizes:
        if world_size > MOST_PUBLISHED:
            yield DRAWN, world_size, drawn_lengths(world_size * TOKENS_PER_RANK, seed=world_size)
