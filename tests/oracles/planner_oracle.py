"""Checks plans and placements one token at a time, from the documents alone.

And the least that any plan of a small batch moves, by trying all of them.
"""

import itertools

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
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(x) for x in lengths])
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
