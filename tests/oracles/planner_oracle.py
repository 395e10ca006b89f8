"""Checks plans and placements one token at a time, from the documents alone.

And the least that any plan of a small batch moves, by trying all of them.
"""

import numpy as np
from mask_oracle import batch_pairs


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


def check_plan(plan, segment_ids, positions=None, mask=None, *, pairs=None, placed=None):
    """Asserts that the plan computes each query once, with the keys that it attends to.

    Args:
      mask: of numbers.
      pairs: `[B, q, k]`, in place of the mask.
      placed: the token at each place of a placement, `[W, tokens]`; by default they are in order.
    """
    batch, columns = segment_ids.shape
    world_size, is_token = plan.world_size, segment_ids.reshape(-1) > 0
    if pairs is None:
        pairs = batch_pairs(mask, segment_ids, positions)
    # home[r] are the token numbers b * columns + column of rank r before planning, in its order.
    home = np.arange(batch * columns).reshape(batch, world_size, -1)
    home = home.swapaxes(0, 1).reshape(world_size, -1)
    rows = home if placed is None else placed
    keys = deliver(plan.kv_metadata, rows, plan.kv_capacity)
    queries = rows
    if placed is None:
        queries = deliver(plan.q_metadata, rows, plan.q_capacity)
    computed, work = np.zeros(batch * columns, int), np.zeros(world_size)
    num_moved = 0
    for rank in range(world_size):
        held = keys[rank][keys[rank] >= 0]
        assert len(np.unique(held)) == len(held), "a key arrives twice"
        num_moved += (~np.isin(held, rows[rank])).sum()
        kv_start, kv_end, *of_keys = (np.asarray(x) for x in plan.local_ranges(rank))
        assert kv_start.shape == kv_end.shape == queries[rank].shape
        assert all(x.shape == (plan.kv_capacity,) for x in of_keys)
        for i, query in enumerate(queries[rank]):
            if query < 0 or not is_token[query]:
                assert kv_start[i] == kv_end[i] == 0
                continue
            seen = np.arange(kv_start[i], kv_end[i])
            if of_keys:
                seen = seen[(of_keys[0][seen] <= i) & (i < of_keys[1][seen])]
            row, column = divmod(int(query), columns)
            wanted = row * columns + np.flatnonzero(pairs[row, column])
            assert np.array_equal(keys[rank, seen], wanted), (rank, i)
            computed[query] += 1
            work[rank] += len(seen)
    np.testing.assert_array_equal(computed, is_token)
    np.testing.assert_allclose(plan.pairs, work, rtol=1e-6)
    before = pairs.sum(2).reshape(-1)[home].sum(1)
    np.testing.assert_allclose(plan.pairs_before, before, rtol=1e-6)
    assert plan.num_kv_tokens_moved == num_moved
    assert plan.fits
    plan.kv_metadata.validate()
    if placed is None:
        plan.q_metadata.validate()
        pieces = (np.asarray(plan.run_row) < np.asarray(plan.num_rows)[:, None]).sum(1)
        slots = (np.asarray(x.num_seqs).max() for x in (plan.q_metadata, plan.kv_metadata))
        needs = ((queries >= 0).sum(1).max(), (keys >= 0).sum(1).max(), *slots, pieces.max())
        np.testing.assert_array_equal(plan.largest_needs, np.tile(needs, (world_size, 1)))


def check_placement(placement, segment_ids, positions=None, mask=None, *, pairs=None, number=0):
    """Asserts that each token has one place, and what `check_plan` does of the plan of a mask."""
    everything = np.arange(segment_ids.size)
    assert np.array_equal(np.sort(placement.permutation), everything)
    assert np.array_equal(placement.permutation[placement.inverse], everything)
    placed = placement.permutation.reshape(placement.world_size, -1)
    plan = placement.plans[number]
    assert placed.shape[1] == plan.num_tokens
    check_plan(plan, segment_ids, positions, mask, pairs=pairs, placed=placed)
    plan.validate(*placement.apply((segment_ids, positions)))


def fewest_bytes(
    lengths, world_size, limit, unit, *, q=0, ranks_per_node=1, placed=False, causal=True
):
    """The least cost, if no rank may have more pairs, of documents of so many units of tokens.

    A key that moves to another node costs 1, a query q. Tries every plan that cuts at units, or
    every placement, of which each rank has equally many; None if all of them exceed the limit, one
    number or one of each rank.
    """
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(x) for x in lengths])
    end, start = unit * (position + 1), unit * position
    pairs = (end * (end + 1) - start * (start + 1)) // 2
    if not causal:
        pairs = unit * unit * np.array(lengths)[document]
    total = len(document)
    choices = np.indices((world_size,) * total, np.int8).reshape(total, -1).T
    if placed:
        of_ranks = (choices[:, :, None] == np.arange(world_size)).sum(1)
        choices = choices[(of_ranks == total // world_size).all(1)]
    on = choices[:, :, None] == np.arange(world_size)  # [plan, unit, rank]
    may = (np.einsum("pur,u->pr", on, pairs) <= limit).all(1)
    choices, on = choices[may], on[may]
    if not len(choices):
        return None
    reads = document[:, None] == document  # [key, query]
    if causal:
        reads &= position[:, None] <= position
    home = choices if placed else (np.arange(total) * world_size // total)[None]
    node = home // ranks_per_node
    is_needed = np.einsum("kq,pqr->pkr", reads, on)  # "or" of booleans
    is_moved = is_needed & (node[:, :, None] != np.arange(world_size) // ranks_per_node)
    costs = q * (choices // ranks_per_node != node).sum(1) + is_moved.sum((1, 2))
    return unit * int(costs.min())


def rows_and_pairs(lengths, rank_of_token, world_size):
    """Counts what a placement moves, and computes: rows `[W, W]` from rank to rank, pairs `[W]`.

    A rank needs all keys of a document up to the last of its queries. `rank_of_token` is of the
    documents, one after another.
    """
    rows, pairs = np.zeros((world_size, world_size)), np.zeros(world_size)
    ends = np.cumsum(lengths)
    for first, end in zip(ends - lengths, ends, strict=True):
        rank = rank_of_token[first:end]
        pairs += np.bincount(rank, np.arange(1, end - first + 1), minlength=world_size)
        last = np.zeros(world_size, int)
        last[rank] = np.arange(1, end - first + 1)
        for target in np.flatnonzero(last) if (rank != rank[0]).any() else ():
            rows[:, target] += np.bincount(rank[: last[target]], minlength=world_size)
    return rows * (1 - np.eye(world_size)), pairs


def times_of_ranks(rows, pairs, *, pair_seconds, row_seconds, size):
    """Returns the work of ranks and their exchange, in seconds.

    An exchange lasts as long as a rank sends or receives, over the slower kind of links: of rows
    inside nodes of `size` ranks, and between them, as in `row_seconds`.
    """
    node = np.arange(len(pairs)) // size
    same = node[:, None] == node
    of_links = zip((np.where(same, rows, 0), np.where(same, 0, rows)), row_seconds, strict=True)
    exchange = [t * np.maximum(x.sum(0), x.sum(1)) for x, t in of_links]
    return pair_seconds * pairs, np.max(exchange, axis=0)
