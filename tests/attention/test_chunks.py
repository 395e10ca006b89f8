"""Documents and chunks: what each rank holds at every step, and that all ranks work equally.

Runs on the host, with one small program per table.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from packed_batches import pack
from properties import examples
from sequences import attended

from jax_cp_dispatch import Hamilton, Ring
from jax_cp_dispatch.attention.rotating.key_chunks import Chunking
from jax_cp_dispatch.documents.layouts import (
    contiguous_layout,
    halves_in_zigzag,
    zigzag_layout,
)
from jax_cp_dispatch.documents.ranges import PackedMask, attended_tokens
from jax_cp_dispatch.masks import Causal, Chunked, Full, SlidingWindow

PLACEMENTS = [contiguous_layout, zigzag_layout, halves_in_zigzag]
few_examples = examples(15)
compiled_attended_tokens = jax.jit(attended_tokens, static_argnames="shape")
MASKS = [
    *(Causal(), Full(), Chunked(1), Chunked(5), Chunked(2**40)),
    *(SlidingWindow(5), SlidingWindow(4, 0), SlidingWindow(None, 2), SlidingWindow(2, 99)),
]


def schedules(num_ranks):
    """Returns by name all schedules that exist for this number of ranks."""
    found = {
        "ring": Ring().schedule("a test", num_ranks),
        "hamilton": Hamilton().schedule("a test", num_ranks),
        "direct": Hamilton(cycles="direct").schedule("a test", num_ranks),
    }
    for nodes in range(2, num_ranks + 1):
        if num_ranks % nodes == 0:
            found[f"{nodes} nodes"] = Hamilton(nodes=nodes).schedule("a test", num_ranks)
    return found


def tabulate(num_ranks, fns):
    """Returns `fn(rank, step)` for all ranks and steps, [rank, step, ...], from one program."""

    def run(numbers):
        over_steps = lambda fn: lambda rank: jax.vmap(lambda step: fn(rank, step))(numbers)
        return {name: jax.vmap(over_steps(fn))(numbers) for name, fn in fns.items()}

    tables = jax.jit(run)(np.arange(num_ranks))
    return jax.tree.map(np.asarray, tables)


# ---- Documents.


@given(
    seed=st.integers(0, 2**32 - 1),
    longest=st.sampled_from([1, 4, 30]),
    told_by=st.sampled_from(["segments", "positions", "both"]),
    mask=st.sampled_from(MASKS),
)
@few_examples
def test_attended_tokens_follow_the_definition(seed, longest, told_by, mask):
    shape = (2, 24)
    segment_ids, positions = pack(np.random.default_rng(seed), *shape, max_length=longest)
    if told_by != "segments":
        segment_ids = np.minimum(segment_ids, 1)
    positions = None if told_by == "segments" else positions
    segment_ids = np.ones_like(segment_ids) if told_by == "positions" else segment_ids
    documents = jax.tree.map(jnp.asarray, (segment_ids, positions))
    got = compiled_attended_tokens(PackedMask(mask, *documents), shape)
    want = attended(shape, segment_ids, positions, mask)
    np.testing.assert_array_equal(got[:2], want)


# ---- Chunks.


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 6, 9])
def test_every_rank_holds_every_chunk_of_every_rank_once(num_ranks):
    """At step 0 each rank holds its own chunks, in their slots."""
    found = schedules(num_ranks)
    tables = tabulate(num_ranks, {name: schedule.held for name, schedule in found.items()})
    ranks = np.arange(num_ranks)[:, None]
    for name, (source, chunk) in tables.items():
        C = found[name].num_chunks
        assert found[name].num_ranks == num_ranks
        np.testing.assert_array_equal(source[:, 0], np.repeat(ranks, C, axis=1), err_msg=name)
        np.testing.assert_array_equal(chunk[:, 0], 0 * ranks + np.arange(C), err_msg=name)
        of_step = np.sort(chunk, axis=-1)  # one token of each number, as `most_tokens` counts
        np.testing.assert_array_equal(of_step, np.broadcast_to(np.arange(C), of_step.shape))
        every = np.sort((source * C + chunk).reshape(num_ranks, -1))
        np.testing.assert_array_equal(every, 0 * ranks + np.arange(num_ranks * C), err_msg=name)


# Each layout and each number of ranks with each number of rows.
SIZES = [
    *((contiguous_layout, 1, 6), (contiguous_layout, 3, 13), (contiguous_layout, 8, 1)),
    *((zigzag_layout, 1, 13), (zigzag_layout, 3, 1), (zigzag_layout, 8, 6)),
    *((halves_in_zigzag, 1, 1), (halves_in_zigzag, 3, 6), (halves_in_zigzag, 8, 13)),
]


@pytest.mark.parametrize("make, num_ranks, per_rank", SIZES)
def test_most_tokens_of_a_step(make, num_ranks, per_rank):
    """No rank holds more at any step; with equal blocks all ranks hold the same number."""
    placement = make(num_ranks, per_rank)
    found = schedules(num_ranks)
    chunkings = {name: Chunking(placement, x.num_chunks) for name, x in found.items()}

    def lengths(name, rank, step):
        return chunkings[name].key_order(*found[name].held(rank, step)).length

    tables = tabulate(num_ranks, {name: partial(lengths, name) for name in found})
    for name, table in tables.items():
        tokens, most = table.sum(-1), chunkings[name].most_tokens
        assert tokens.max() <= most, name
        if len(set(placement.lengths.flat)) == 1:
            assert (tokens == per_rank).all() and most == per_rank, name


# ---- Work.


def pairs(num_ranks, make, rows_per_chunk, *, causal=True):
    """Returns the query-key pairs of one document per rank and step, by schedule.

    A rank holds `rows_per_chunk` rows for every chunk of the schedule.
    """

    def of(schedule):
        placement = make(num_ranks, rows_per_chunk * schedule.num_chunks)
        chunking = Chunking(placement, schedule.num_chunks)

        def of_step(rank, step):
            token = placement.positions(rank)[None]
            end = jnp.where(token >= 0, token + 1 if causal else placement.num_tokens, 0)
            order = chunking.key_order(*schedule.held(rank, step))
            return jnp.sum(order.rows_before(end) - order.rows_before(jnp.zeros_like(end)))

        return of_step

    found = schedules(num_ranks)
    tables = tabulate(num_ranks, {name: of(schedule) for name, schedule in found.items()})
    return {name: (rows_per_chunk * found[name].num_chunks, tables[name]) for name in found}


@pytest.mark.parametrize(
    "make, num_ranks", [(zigzag_layout, 2), (zigzag_layout, 3), (halves_in_zigzag, 6)]
)
def test_causal_work_is_equal_for_all_ranks_at_every_step(make, num_ranks):
    """In zigzag layout the halves of chunks balance; step 0 also has the diagonal."""
    for name, (rows, work) in pairs(num_ranks, make, 2).items():
        assert (work[:, 1:] == rows**2 // 2).all(), name
        assert (work[:, 0] == rows * (rows + 1) // 2).all(), name
        num_tokens = num_ranks * rows
        assert work.sum() == num_tokens * (num_tokens + 1) // 2


@pytest.mark.parametrize("make", PLACEMENTS)
def test_full_work_is_equal_in_any_layout(make):
    for rows, work in pairs(4, make, 2, causal=False).values():
        assert (work == rows**2).all()


def test_causal_work_on_contiguous_parts_is_unequal():
    """In a plain ring the last rank works at every step, the first one only once."""
    rows, work = pairs(4, contiguous_layout, 6)["ring"]
    np.testing.assert_array_equal(work[:, 0], rows * (rows + 1) // 2)
    works = np.arange(1, 4) <= np.arange(4)[:, None]
    np.testing.assert_array_equal(work[:, 1:], rows**2 * works)


@pytest.mark.parametrize("num_ranks, rows_per_chunk", [(2, 1), (3, 7), (5, 3)])
def test_uneven_lengths_lose_no_pair(num_ranks, rows_per_chunk):
    for rows, work in pairs(num_ranks, zigzag_layout, rows_per_chunk).values():
        num_tokens = num_ranks * rows
        assert work.sum() == num_tokens * (num_tokens + 1) // 2
