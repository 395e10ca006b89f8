"""NumPy oracle of expert parallelism: choice by choice, in Python loops, from the definition."""

import numpy as np


def evenly(num_experts, num_ranks):
    """The expert in each place of each rank, [W, L]."""
    return np.arange(num_experts).reshape(num_ranks, -1)


def rows_of_ranks(index, held):
    """Returns the rows of each rank's experts, as lists of (expert place, rank, token, choice).

    Args:
      index: [W, T, k], the experts of each token; -1 is none.
      held: [W, L], the expert in each place of each rank.
    """
    W, T, k = index.shape
    places = {}
    for place, expert in enumerate(held.ravel()):
        places.setdefault(int(expert), []).append(place)
    rows = [[] for _ in range(W)]
    for rank in range(W):
        for token in range(T):
            for choice in range(k):
                expert = int(index[rank, token, choice])
                if expert >= 0:
                    place = places[expert][(rank + token) % len(places[expert])]
                    to, local = divmod(place, held.shape[1])
                    rows[to].append((local, rank, token, choice))
    return [sorted(each) for each in rows]


def grouped_rows(x, index, held, capacity):
    """Returns what each rank's experts get of x [W, T, ...], and the sizes of their groups."""
    out = np.zeros((len(x), capacity, *x.shape[2:]), x.dtype)
    sizes = np.zeros(held.shape, int)
    for rank, rows in enumerate(rows_of_ranks(index, held)):
        for i, (local, source, token, _) in enumerate(rows):
            out[rank, i] = x[source, token]
            sizes[rank, local] += 1
    return out, sizes


def summed_rows(y, weights, index, held):
    """Returns the weighted sums, in float64, of the rows y [W, capacity, ...] of each token."""
    W, T, _ = index.shape
    out = np.zeros((W, T, *y.shape[2:]))
    for rank, rows in enumerate(rows_of_ranks(index, held)):
        for i, (_, source, token, choice) in enumerate(rows):
            weight = 1.0 if weights is None else float(weights[source, token, choice])
            out[source, token] += weight * y[rank, i].astype(float)
    return out


def num_moved(index, held):
    """Returns how many tokens each rank sends to each; a token counts once for a rank."""
    W = len(index)
    sent = np.zeros((W, W), int)
    for rank, rows in enumerate(rows_of_ranks(index, held)):
        for source, _ in {(source, token) for _, source, token, _ in rows}:
            sent[source, rank] += 1
    return sent


def kept_rows(counts, capacity):
    """Returns the quotas [W, W, L] of counts [from, to, place]: row by row, in rounds.

    In each round, every rank and place that still has a row gets one, until a rank is full.
    """
    kept = np.zeros_like(counts)
    for to in range(counts.shape[1]):
        need, got = counts[:, to], kept[:, to]
        left = min(capacity, need.sum())
        while left:
            for at in np.argwhere(got < need)[:left]:
                got[tuple(at)] += 1
                left -= 1
    return kept


def after_drops(index, weights, held, capacity):
    """Returns the index with -1 for what is dropped where each rank has `capacity` rows."""
    W, _, _ = index.shape
    counts = np.zeros((W, *held.shape), int)
    rows = rows_of_ranks(index, held)
    for to, each in enumerate(rows):
        for local, source, _, _ in each:
            counts[source, to, local] += 1
    kept, out = kept_rows(counts, capacity), index.copy()
    for to, each in enumerate(rows):
        for source in range(W):
            for place in range(held.shape[1]):
                mine = [(t, j) for local, r, t, j in each if (r, local) == (source, place)]
                mine.sort(key=lambda tj: -weights[source][tj])  # stable: of equal ones the first
                for token, choice in mine[kept[source, to, place] :]:
                    out[source, token, choice] = -1
    return out
