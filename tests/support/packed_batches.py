"""Random packed documents for tests, and their key ranges."""

import numpy as np


def pack(rng, batch, num_tokens, *, max_length, padding=0.1):
    """Returns segment ids and positions [B, T] of random documents, with padding between them."""
    segment_ids, positions = np.zeros((2, batch, num_tokens), np.int32)
    for row in range(batch):
        at, document = 0, 0
        while at < num_tokens:
            length = min(int(rng.integers(1, max_length + 1)), num_tokens - at)
            if rng.random() >= padding:
                document += 1
                segment_ids[row, at : at + length] = document
                positions[row, at : at + length] = np.arange(length)
            at += length
    return segment_ids, positions


def causal_ranges(segment_ids):
    """Returns each query's keys [start, end) in its batch row: its document up to itself."""
    batch, num_tokens = segment_ids.shape
    start, end = np.zeros((2, batch, num_tokens), np.int32)
    for row in range(batch):
        for t in range(num_tokens):
            if segment_ids[row, t] == 0:
                continue
            is_same = t > 0 and segment_ids[row, t] == segment_ids[row, t - 1]
            start[row, t] = start[row, t - 1] if is_same else t
            end[row, t] = t + 1
    return start, end
