"""Checks a placement one token at a time, from the documents alone."""

import itertools

import numpy as np
from mask_oracle import sees


def document_table(lengths, columns):
    """Returns each token's document (-1: padding) and its position in it, row by row."""
    document = np.full((len(lengths), columns), -1)
    position = np.zeros((len(lengths), columns), int)
    number = 0
    for b, row in enumerate(lengths):
        at = 0
        for length in row:
            document[b, at : at + length] = number
            position[b, at : at + length] = np.arange(length)
            at, number = at + length, number + 1
    return document.reshape(-1), position.reshape(-1)


def deliver(metadata, rows, capacity):
    """Moves rows `[W, T]` by the metadata, from ranges at src_offset; -1 marks unwritten rows."""
    fields = ("dst_rank", "dst_offset", "seq_len", "src_offset")
    dst_rank, dst_offset, seq_len, src_offset = (
        np.asarray(getattr(metadata, name)).astype(np.int64) for name in fields
    )
    world_size = metadata.world_size
    buffer = np.full((world_size, capacity), -1)
    received = np.zeros((world_size, world_size), np.int64)
    for source, slot in itertools.product(range(world_size), range(dst_rank.shape[1])):
        target, length = dst_rank[source, slot], seq_len[source, slot]
        if target < 0:
            assert length == 0
            continue
        assert length > 0 and dst_offset[source, slot] + length <= capacity
        into = buffer[target, dst_offset[source, slot] :][:length]
        assert (into == -1).all(), "two ranges overlap"
        first = src_offset[source, slot]
        assert first + length <= rows.shape[1]
        into[:] = rows[source, first : first + length]
        received[target, source] += length
    counts = np.asarray(metadata.num_recv_tokens).astype(np.int64)
    assert (counts[:, :-1] == received).all()
    assert (counts[:, -1] == received.sum(1)).all()
    return buffer


def check_placement(placement, lengths, mask=None):
    """Asserts that each token has one place and each query its keys; returns pairs, keys moved."""
    world_size, columns = placement.world_size, placement.columns
    document, position = document_table(lengths, columns)
    sizes = np.bincount(document[document >= 0])
    total = len(document)
    assert np.array_equal(np.sort(placement.permutation), np.arange(total))
    assert np.array_equal(placement.permutation[placement.inverse], np.arange(total))
    rows = placement.permutation.reshape(world_size, -1)
    assert rows.shape[1] == placement.plan.num_tokens

    plan = placement.plan
    plan.kv_metadata.validate()
    keys = deliver(plan.kv_metadata, rows, plan.kv_capacity)
    pairs = np.zeros(world_size)
    for rank in range(world_size):
        held = keys[rank][keys[rank] >= 0]
        assert len(np.unique(held)) == len(held), "a key arrives twice"
        start, end = (np.asarray(x) for x in plan.local_ranges(rank))
        for row, token in enumerate(rows[rank]):
            if document[token] < 0:
                assert start[row] == end[row] == 0
                continue
            start_of_document = token - position[token]
            places = np.arange(int(sizes[document[token]]))
            wanted = start_of_document + places[sees(mask, position[token], places)]
            assert np.array_equal(keys[rank, start[row] : end[row]], wanted)
            pairs[rank] += len(wanted)
    np.testing.assert_allclose(plan.pairs, pairs, rtol=1e-6)
    own = [np.isin(keys[rank], rows[rank]) for rank in range(world_size)]
    moved = sum(int(((keys[r] >= 0) & ~own[r]).sum()) for r in range(world_size))
    assert plan.num_kv_tokens_moved == moved
    return pairs, moved


def fewest_keys(lengths, world_size, limit, unit, nodes=None, causal=True):
    """Returns the fewest moved keys if each rank has at most `limit` pairs.

    Document lengths are in units of `unit` tokens. Tries every placement that cuts at units;
    returns None if all of them exceed the limit. The limit may be one per rank. With the node of
    each rank, only keys that move between nodes count.
    """
    limit = np.broadcast_to(limit, world_size)
    swaps = [np.arange(world_size)]
    if nodes is not None or len(set(limit)) > 1:  # ranks are not alike
        swaps = [np.array(x) for x in itertools.permutations(range(world_size))]
    document, position = document_table([lengths], sum(lengths))
    end = (position + 1) * unit
    start = position * unit
    pairs = (end * (end + 1) - start * (start + 1)) // 2
    if not causal:
        pairs = unit * unit * np.array(lengths)[document]
    best = None
    ways = (swap[ranks] for ranks in _ways(len(document), world_size) for swap in swaps)
    for ranks in ways:
        if (np.bincount(ranks, pairs, minlength=world_size) > limit).any():
            continue
        moved = 0
        for rank in range(world_size):
            mine = ranks == rank
            for d in np.unique(document[mine]):
                needed = document == d
                if causal:
                    needed &= position <= position[mine & needed].max()
                here = mine if nodes is None else nodes[ranks] == nodes[rank]
                moved += (needed & ~here).sum()
        best = moved if best is None else min(best, moved)
    return None if best is None else unit * int(best)


def _ways(total, world_size):
    """Yields all ways to give every rank equally many; the first free one goes to the next rank."""
    share = total // world_size

    def extend(ranks, left):
        if not left:
            yield ranks
            return
        free = np.flatnonzero(ranks < 0)
        rank = world_size - left
        for rest in itertools.combinations(free[1:], share - 1):
            chosen = ranks.copy()
            chosen[[free[0], *rest]] = rank
            yield from extend(chosen, left - 1)

    yield from extend(np.full(total, -1), world_size)
