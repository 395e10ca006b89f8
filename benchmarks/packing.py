"""Packed documents with published lengths (tests/data) or log-normal lengths."""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
from common import ROOT

from jax_cp_dispatch.bench_command.documents import MEDIAN, SIGMA, drawn_lengths

DRAWN = f"log-normal, median {MEDIAN}, sigma {SIGMA}"
PUBLISHED = ROOT / "tests" / "data" / "lengths"


def published(path: pathlib.Path, num_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields seed and segment ids [1, num_tokens] of each batch of the smallest sufficient size."""
    batches = [batch for batch in json.loads(path.read_text()) if batch["tokens"] >= num_tokens]
    if not batches:
        raise ValueError(f"{path} has no batch of {num_tokens} tokens. Pass fewer tokens.")
    size = min(batch["tokens"] for batch in batches)
    for batch in batches:
        if batch["tokens"] == size:
            yield batch["seed"], segment_ids(batch["lengths"], num_tokens)


def drawn(num_tokens: int, seed: int) -> np.ndarray:
    """Draws segment ids [1, num_tokens] of log-normal documents."""
    return segment_ids(drawn_lengths(num_tokens, seed=seed), num_tokens)


def segment_ids(lengths, num_tokens: int) -> np.ndarray:
    """Returns consecutive documents until all tokens are used; the last one is cut."""
    ends = np.minimum(np.cumsum(lengths), num_tokens)
    count = np.diff(ends, prepend=0)
    return np.repeat(np.arange(1, len(count) + 1), count)[None].astype(np.int32)
