"""Checks a plan one token at a time, from the segment ids alone."""

import numpy as np


def first_keys(segment_ids, positions=None, window=None):
    """First column that each column attends to, [B, T]; -1 at padding."""
    first = documents(segment_ids, positions)
    if window is None:
        return first
    return np.where(first >= 0, np.maximum(first, np.arange(segment_ids.shape[1]) + 1 - window), -1)


def documents(segment_ids, positions=None):
    """First column of the document of each column, [B, T]; -1 at padding."""
    first = np.full(segment_ids.shape, -1)
    for b, row in enumerate(segment_ids):
        for i, segment in enumerate(row):
            if segment == 0:
                continue
            same = i > 0 and row[i - 1] == segment
            if same and positions is not None:
                same = positions[b, i] > positions[b, i - 1]
            first[b, i] = first[b, i - 1] if same else i
    return first


def pairs_per_rank(segment_ids, positions, world_size, window=None):
    first = first_keys(segment_ids, positions, window)
    column = np.arange(segment_ids.shape[1])
    pairs = np.where(first >= 0, column + 1 - first, 0)
    return pairs.reshape(len(pairs), world_size, -1).sum((0, 2))


def deliver(metadata, rows, capacity):
    """Moves row numbers by the metadata; returns them per rank, -1 for rows without data."""
    dst_rank, dst_offset, seq_len, received = (
        np.asarray(x).astype(np.int64)
        for x in (
            metadata.dst_rank,
            metadata.dst_offset,
            metadata.seq_len,
            metadata.num_recv_tokens,
        )
    )
    world_size, num_slots = seq_len.shape
    assert metadata.src_offset is None
    assert metadata.world_size == world_size == len(rows)
    assert (seq_len.sum(1) == rows.shape[1]).all()
    dst_rank = dst_rank.reshape(world_size, num_slots, -1)
    dst_offset = dst_offset.reshape(dst_rank.shape)
    buffer = np.full((world_size, capacity), -1)
    sent = np.zeros((world_size, world_size), np.int64)
    for rank in range(world_size):
        start = 0
        for slot in range(num_slots):
            length = seq_len[rank, slot]
            for target, offset in zip(dst_rank[rank, slot], dst_offset[rank, slot], strict=True):
                if target < 0:
                    assert offset == 0
                    continue
                assert offset + length <= capacity, "a block goes beyond the capacity"
                place = buffer[target, offset : offset + length]
                assert (place == -1).all(), "two blocks overlap"
                place[:] = rows[rank, start : start + length]
                sent[target, rank] += length
            start += length
    assert (received[:, :-1] == sent).all()
    assert (received[:, -1] == sent.sum(1)).all()
    assert (np.asarray(metadata.num_total_recv_tokens) == sent.sum(1)).all()
    for rank in range(world_size):
        assert (buffer[rank, : sent[rank].sum()] >= 0).all(), "there is a gap"
    return buffer


def check_plan(plan, segment_ids, positions=None, window=None):
    """Asserts that the plan computes each query once, with the keys that it attends to."""
    batch, columns = segment_ids.shape
    world_size = plan.world_size
    # rows[r] are the token numbers b * columns + column of rank r, in its own order.
    rows = np.arange(batch * columns).reshape(batch, world_size, -1)
    rows = rows.swapaxes(0, 1).reshape(world_size, -1)
    first = first_keys(segment_ids, positions, window).reshape(-1)
    base = np.repeat(np.arange(batch) * columns, columns)

    queries = deliver(plan.q_metadata, rows, plan.q_capacity)
    keys = deliver(plan.kv_metadata, rows, plan.kv_capacity)
    kv_start, kv_end = np.asarray(plan.kv_start), np.asarray(plan.kv_end)
    assert kv_start.shape == kv_end.shape == (world_size, plan.q_capacity)
    computed = np.zeros(batch * columns, int)
    pairs = np.zeros(world_size)
    for rank in range(world_size):
        held = keys[rank][keys[rank] >= 0]
        assert len(np.unique(held)) == len(held), "a key arrives twice"
        for i, query in enumerate(queries[rank]):
            start, end = kv_start[rank, i], kv_end[rank, i]
            if query < 0 or first[query] < 0:
                assert start == end == 0
                continue
            computed[query] += 1
            pairs[rank] += end - start
            prefix = np.arange(int(base[query] + first[query]), query + 1)
            assert np.array_equal(keys[rank, start:end], prefix), (rank, i, start, end)
    np.testing.assert_array_equal(computed, first >= 0)
    np.testing.assert_allclose(plan.pairs_after, pairs, rtol=1e-6)
    before = pairs_per_rank(segment_ids, positions, world_size, window)
    np.testing.assert_allclose(plan.pairs_before, before, rtol=1e-6)
    plan.q_metadata.validate()
    plan.kv_metadata.validate()
