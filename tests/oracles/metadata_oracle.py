"""Brute-force oracle of planning: NumPy loops over shards and tokens, without package code."""

from typing import Any

import numpy as np


def random_shards(rng, world_size, num_shards, num_replicas=None, max_len=7):
    """Draws lengths and destinations with holes, zero lengths, rows that stay, and empty ranks."""
    shape = (world_size, num_shards) + (() if num_replicas is None else (num_replicas,))
    seq_len = rng.integers(0, max_len, (world_size, num_shards))
    dispatch = rng.integers(-1, world_size, shape)
    padding = rng.random((world_size, num_shards)) < 0.2
    seq_len[padding], dispatch[padding] = 0, -1
    if world_size > 1:
        empty = rng.integers(world_size)  # receives nothing
        dispatch = np.where(dispatch == empty, -1, dispatch)
        silent = rng.integers(world_size)  # sends nothing
        dispatch[silent] = -1
    return seq_len, dispatch


def last_used(used):
    """Maps [W, S] bool to the last used slot + 1."""
    return np.array([max([i + 1 for i, u in enumerate(row) if u], default=0) for row in used])


def with_total(matrix):
    return np.concatenate([matrix, matrix.sum(1, keepdims=True)], 1)


def _fields(dst_rank, dst_offset, seq_len, received, **more):
    sent = dst_rank >= 0
    used = (sent.any(-1) if sent.ndim == 3 else sent) | (seq_len > 0)
    return {
        "dst_rank": dst_rank,
        "dst_offset": dst_offset,
        "seq_len": seq_len,
        "num_recv_tokens": with_total(received),
        "num_total_recv_tokens": received.sum(1),
        "num_seqs": last_used(used),
        **more,
    }


def _reverse(arrivals, seq_len, dispatch, received, num_slots):
    """arrivals[d] = {slot: (rank, slot at home, replica)}."""
    world_size = len(seq_len)
    need = max([max(a, default=-1) + 1 for a in arrivals] + [1])
    shape = (world_size, num_slots or need)
    dst_rank, dst_offset, length = np.full(shape, -1), np.zeros(shape, int), np.zeros(shape, int)
    for d, slots in enumerate(arrivals):
        for slot, (r, s, c) in slots.items():
            dst_rank[d, slot] = r
            dst_offset[d, slot] = c * seq_len[r].sum() + seq_len[r, :s].sum()
            length[d, slot] = seq_len[r, s]
    mask = {"seq_recv_mask": dispatch >= 0} if dispatch.ndim == 3 else {}
    return _fields(dst_rank, dst_offset, length, received.T, recv_seq_lens=seq_len, **mask)


def plan(seq_len, dispatch, num_slots=None):
    """Oracle of compute_metadata: dictionaries of the forward and the reverse fields."""
    world_size, num_shards = seq_len.shape
    replicas = dispatch.reshape(world_size, num_shards, -1)
    offset = np.zeros(replicas.shape, int)
    received = np.zeros((world_size, world_size), int)
    arrivals = [{} for _ in range(world_size)]
    for r, s, c in np.ndindex(replicas.shape):
        d = replicas[r, s, c]
        if d >= 0:
            offset[r, s, c] = received[d].sum()
            received[d, r] += seq_len[r, s]
            arrivals[d][len(arrivals[d])] = (r, s, c)
    forward = _fields(dispatch, offset.reshape(dispatch.shape), seq_len, received)
    return forward, _reverse(arrivals, seq_len, dispatch, received, num_slots)


def plan_kv(mapping, position, context, num_kv, kv_tokens, seq_len, q_dispatch, num_slots=None):
    """Oracle of compute_metadata_kv, which lays out each rank query by query."""
    world_size = len(seq_len)
    first_row, first_slot = np.zeros(q_dispatch.shape, int), np.zeros(q_dispatch.shape, int)
    rows, slots = np.zeros(world_size, int), np.zeros(world_size, int)
    for r, s in np.ndindex(q_dispatch.shape):
        d = q_dispatch[r, s]
        if d >= 0:
            first_row[r, s], first_slot[r, s] = rows[d], slots[d]
            rows[d] += kv_tokens[r, s]
            slots[d] += num_kv[r, s]
    dst = np.full(position.shape, -1)
    offset = np.zeros(position.shape, int)
    received = np.zeros((world_size, world_size), int)
    arrivals = [{} for _ in range(world_size)]
    for r, s, c in np.ndindex(position.shape):
        q = tuple(mapping[r, s, c])
        if q[0] < 0 or q_dispatch[q] < 0:
            continue
        d = dst[r, s, c] = q_dispatch[q]
        offset[r, s, c] = first_row[q] + context[r, s]
        received[d, r] += seq_len[r, s]
        arrivals[d][first_slot[q] + position[r, s, c]] = (r, s, c)
    forward = _fields(dst, offset, seq_len, received)
    return forward, _reverse(arrivals, seq_len, dst, received, num_slots)


def attn_layout(shard_len, context, dispatch, num_slots=None):
    """Oracle of compute_attn_layout_seqlens, as a dictionary."""
    world_size = len(shard_len)
    got = [[] for _ in range(world_size)]
    for r, s in np.ndindex(dispatch.shape):
        if dispatch[r, s] >= 0:
            got[dispatch[r, s]].append((shard_len[r, s], context[r, s]))
    num_slots = num_slots or max([len(g) for g in got] + [1])
    padded = np.array([g + [(0, 0)] * (num_slots - len(g)) for g in got])
    cu = np.concatenate([np.zeros((world_size, 1, 2), int), padded.cumsum(1)], 1)
    return {
        "cu_seqlens_q": cu[..., 0],
        "cu_seqlens_kv": cu[..., 1],
        "max_seqlen_q": padded[..., 0].max(1),
        "max_seqlen_kv": padded[..., 1].max(1),
        "num_local_seqs": np.array([len(g) for g in got]),
    }


def spanning_documents(rng, world_size, num_shards, num_replicas):
    """KV inputs of documents that span ranks: shard i of a document sees its shards 0 … i.

    Assigns slots to documents at random, in global order, at most `num_replicas` per document;
    remaining slots are padding. Returns the arguments of compute_metadata_kv without num_seqs.
    """
    shape = (world_size, num_shards)
    seq_len = np.zeros(shape, int)
    context, num_kv, kv_tokens = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, int)
    q_dispatch = np.full(shape, -1)
    mapping = np.full((*shape, num_replicas, 2), -1)
    position = np.full((*shape, num_replicas), -1)
    documents = {}
    for slot in np.ndindex(shape):
        document = documents.setdefault(int(rng.integers(world_size * num_shards // 2 + 1)), [])
        if len(document) < num_replicas and rng.random() < 0.85:
            document.append(slot)
            seq_len[slot] = rng.integers(0, 6)
            q_dispatch[slot] = rng.integers(-1, world_size)
    for document in documents.values():
        for i, kv in enumerate(document):
            context[kv] = sum(seq_len[other] for other in document[:i])
            num_kv[kv], kv_tokens[kv] = i + 1, context[kv] + seq_len[kv]
            for c, query in enumerate(document[i:]):
                mapping[kv][c], position[kv][c] = query, i
    return mapping, position, context, num_kv, kv_tokens, seq_len, q_dispatch


def move(tensor, output, dst_rank, dst_offset, seq_len, src_offset=None):
    """Moves rows as a perfect network does, token by token."""
    output = output.copy()
    for r, s in np.ndindex(seq_len.shape):
        start = seq_len[r, :s].sum() if src_offset is None else src_offset[r, s]
        for d, o in zip(np.ravel(dst_rank[r, s]), np.ravel(dst_offset[r, s]), strict=True):
            for i in range(seq_len[r, s] if d >= 0 else 0):
                output[d, o + i] = tensor[r, start + i]
    return output


def assert_fields(metadata, expected):
    for name, want in expected.items():
        np.testing.assert_array_equal(np.asarray(getattr(metadata, name)), want, err_msg=name)


def kv_arguments(seed=0, world_size=3, num_shards=5, num_replicas=4) -> tuple[Any, ...]:
    """Arguments of `compute_metadata_kv`, of documents that span ranks."""
    rng = np.random.default_rng(seed)
    *rest, q_dispatch = spanning_documents(rng, world_size, num_shards, num_replicas)
    num_seqs = last_used((rest[5] > 0) | (rest[1] >= 0).any(-1))
    return (*rest, num_seqs, q_dispatch)
