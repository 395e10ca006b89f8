"""Lengths of packed documents, drawn from a log-normal distribution."""

import numpy as np

MEDIAN, SIGMA = 2048, 1.2


def drawn_lengths(num_tokens: int, *, seed: int, median: int | float = MEDIAN) -> list[int]:
    """Returns lengths of documents that fill `num_tokens`; the last one is cut."""
    normal = np.random.default_rng(0).standard_normal(100_000)
    lengths = np.ceil(median * np.exp(SIGMA * normal)).astype(int)
    count = 1
    while (drawn := np.random.default_rng(seed).choice(lengths, count)).sum() < num_tokens:
        count *= 2  # the first ones stay the same
    ends = np.minimum(np.cumsum(drawn), num_tokens)
    counts = np.diff(ends, prepend=0)
    return counts[counts > 0].tolist()


def segment_ids_of(lengths: list[int]) -> np.ndarray:
    """Returns segment ids [1, T] of documents that follow each other."""
    return np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]
