"""Checks a plan one token at a time, from the segment ids alone."""

import numpy as np
from mask_oracle import batch_ranges


def pairs_per_rank(segment_ids, positions, world_size, mask=None):
    first, last = batch_ranges(mask, segment_ids, positions)
    return (last - first).reshape(len(first), world_size, -1).sum((0, 2))


def deliver(metadata, rows, capacity):
    """Moves row numbers as the metadata says; returns them per rank, -1 where nothing arrived."""
    fields = ("dst_rank", "dst_offset", "seq_len", "src_offset", "num_recv_tokens")
    dst_rank, dst_offset, seq_len, src_offset, received = (
        np.asarray(getattr(metadata, name)).astype(np.int64) for name in fields
    )
    world_size, num_slots = seq_len.shape
    assert metadata.world_size == world_size == len(rows)
    assert dst_rank.shape == dst_offset.shape == src_offset.shape == seq_len.shape
    buffer = np.full((world_size, capacity), -1)
    sent = np.zeros((world_size, world_size), np.int64)
    for rank in range(world_size):
        used = dst_rank[rank] >= 0
        assert used[: used.sum()].all() and metadata.num_seqs[rank] == used.sum()
        for slot in range(num_slots):
            target, offset, length = (
                dst_rank[rank, slot],
                dst_offset[rank, slot],
                seq_len[rank, slot],
            )
            first = src_offset[rank, slot]
            if target < 0:
                assert offset == length == first == 0
                continue
            assert length > 0 and offset + length <= capacity, "a range goes beyond the capacity"
            assert first + length <= rows.shape[1], "a range goes beyond the sender's rows"
            place = buffer[target, offset : offset + length]
            assert (place == -1).all(), "two ranges overlap"
            place[:] = rows[rank, first : first + length]
            sent[target, rank] += length
    assert (received[:, :-1] == sent).all()
    assert (received[:, -1] == sent.sum(1)).all()
    assert (np.asarray(metadata.num_total_recv_tokens) == sent.sum(1)).all()
    for rank in range(world_size):
        assert (buffer[rank, : sent[rank].sum()] >= 0).all(), "there is a gap"
    return buffer


def check_plan(plan, segment_ids, positions=None, mask=None):
    """Asserts that the plan computes each query once, with the keys that it attends to."""
    batch, columns = segment_ids.shape
    world_size = plan.world_size
    # rows[r] are the token numbers b * columns + column of rank r, in its own order.
    rows = np.arange(batch * columns).reshape(batch, world_size, -1)
    rows = rows.swapaxes(0, 1).reshape(world_size, -1)
    first, last = (x.reshape(-1) for x in batch_ranges(mask, segment_ids, positions))
    base = np.repeat(np.arange(batch) * columns, columns)

    queries = deliver(plan.q_metadata, rows, plan.q_capacity)
    keys = deliver(plan.kv_metadata, rows, plan.kv_capacity)
    computed = np.zeros(batch * columns, int)
    pairs = np.zeros(world_size)
    for rank in range(world_size):
        held = keys[rank][keys[rank] >= 0]
        assert len(np.unique(held)) == len(held), "a key arrives twice"
        kv_start, kv_end = (np.asarray(x) for x in plan.local_ranges(rank))
        assert kv_start.shape == kv_end.shape == (plan.q_capacity,)
        for i, query in enumerate(queries[rank]):
            start, end = kv_start[i], kv_end[i]
            if query < 0 or last[query] == 0:
                assert start == end == 0
                continue
            computed[query] += 1
            pairs[rank] += end - start
            seen = base[query] + np.arange(first[query], last[query])
            assert np.array_equal(keys[rank, start:end], seen), (rank, i, start, end)
    np.testing.assert_array_equal(computed, last > 0)
    np.testing.assert_allclose(plan.pairs, pairs, rtol=1e-6)
    before = pairs_per_rank(segment_ids, positions, world_size, mask)
    np.testing.assert_allclose(plan.pairs_before, before, rtol=1e-6)
    pieces = (np.asarray(plan.run_row) < np.asarray(plan.num_rows)[:, None]).sum(1)
    slots = (np.asarray(x.num_seqs).max() for x in (plan.q_metadata, plan.kv_metadata))
    needs = ((queries >= 0).sum(1).max(), (keys >= 0).sum(1).max(), *slots, pieces.max())
    np.testing.assert_array_equal(plan.largest_needs, np.tile(needs, (world_size, 1)))
    assert plan.fits
    plan.q_metadata.validate()
    plan.kv_metadata.validate()


def check_plan_of_pairs(plan, segment_ids, visible):
    """`check_plan` for any mask: `visible[b, q, k]` are the pairs of each batch row."""
    batch, columns = segment_ids.shape
    world_size = plan.world_size
    rows = np.arange(batch * columns).reshape(batch, world_size, -1)
    rows = rows.swapaxes(0, 1).reshape(world_size, -1)
    queries = deliver(plan.q_metadata, rows, plan.q_capacity)
    keys = deliver(plan.kv_metadata, rows, plan.kv_capacity)
    computed = np.zeros(batch * columns, int)
    pairs = np.zeros(world_size)
    for rank in range(world_size):
        held = keys[rank][keys[rank] >= 0]
        assert len(np.unique(held)) == len(held), "a key arrives twice"
        kv_start, kv_end, *of_keys = (np.asarray(x) for x in plan.local_ranges(rank))
        assert all(x.shape == (plan.kv_capacity,) for x in of_keys)
        for i, query in enumerate(queries[rank]):
            if query < 0 or segment_ids.reshape(-1)[query] == 0:
                assert kv_start[i] == kv_end[i] == 0
                continue
            seen = np.arange(kv_start[i], kv_end[i])
            if of_keys:
                seen = seen[(of_keys[0][seen] <= i) & (i < of_keys[1][seen])]
            row, column = divmod(int(query), columns)
            wanted = row * columns + np.flatnonzero(visible[row, column])
            assert np.array_equal(keys[rank, seen], wanted), (rank, i)
            computed[query] += 1
            pairs[rank] += len(seen)
    np.testing.assert_array_equal(computed, segment_ids.reshape(-1) > 0)
    np.testing.assert_allclose(plan.pairs, pairs, rtol=1e-6)
    before = visible.sum(2).reshape(batch, world_size, -1).sum((0, 2))
    np.testing.assert_allclose(plan.pairs_before, before, rtol=1e-6)
    assert plan.fits


def fewest_bytes(lengths, world_size, limit, unit, q, ranks_per_node=1):
    """The least cost, if no rank may have more pairs, of documents of so many units of tokens.

    A key that moves to another node costs 1, a query q. Tries every plan that cuts at units; None
    if all of them exceed the limit, one number or one of each rank.
    """
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(x) for x in lengths])
    end, start = unit * (position + 1), unit * position
    pairs = (end * (end + 1) - start * (start + 1)) // 2
    home = np.arange(len(document)) * world_size // len(document)
    node = home // ranks_per_node
    choices = np.indices((world_size,) * len(document)).reshape(len(document), -1).T
    on = choices[:, :, None] == np.arange(world_size)  # [plan, unit, rank]
    may = (np.einsum("pur,u->pr", on, pairs) <= limit).all(1)
    choices, on = choices[may], on[may]
    if not len(choices):
        return None
    reads = (document[:, None] == document) & (position[:, None] <= position)  # [key, query]
    is_needed = np.einsum("kq,pqr->pkr", reads, on)  # "or" of booleans
    is_moved = is_needed & (node[:, None] != np.arange(world_size) // ranks_per_node)
    costs = q * (choices // ranks_per_node != node).sum(1) + is_moved.sum((1, 2))
    return unit * int(costs.min())
