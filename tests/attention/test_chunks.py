"""Chunks of keys and the order of tokens: what each rank holds at every step; equal work.

Runs on the host, with one small program per table.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from properties import examples

from jax_cp_dispatch import Hamilton, Ring
from jax_cp_dispatch.attention.rotating.key_chunks import Chunking  # inner: on the host
from jax_cp_dispatch.documents import zigzag_permutation
from jax_cp_dispatch.documents.layouts import (  # inner: on the host
    contiguous_layout,
    halves_in_zigzag,
    zigzag_layout,
)

PLACEMENTS = [contiguous_layout, zigzag_layout, halves_in_zigzag]


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


# ---- Chunks.


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 6])
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


def test_the_direct_schedule_uses_each_link_once_per_step():
    for n in (2, 5, 8):
        schedule = Hamilton(cycles="direct").schedule("a test", n)
        held = [[schedule.held(rank, step) for rank in range(n)] for step in range(n)]
        source, chunk = np.moveaxis(np.array(held), 2, 0)  # each [step, rank, slot]
        seen = np.sort((source * n + chunk).swapaxes(0, 1).reshape(n, -1), axis=1)  # of each rank
        every_chunk = (np.arange(n)[:, None] * n + np.arange(n - 1)).ravel()
        np.testing.assert_array_equal(seen, np.broadcast_to(every_chunk, seen.shape))
        others = np.delete(np.tile(np.arange(n), (n, 1)), np.arange(n) * (n + 1))
        for step in source[1:]:
            np.testing.assert_array_equal(np.sort(step, axis=1), others.reshape(n, n - 1))


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


# ---- The order of tokens.


@given(num_ranks=st.integers(1, 40), per_rank=st.integers(0, 40))
@examples(15)
def test_zigzag_permutation_is_that_of_blocks(num_ranks, per_rank):
    num_tokens = num_ranks * per_rank
    order = zigzag_permutation(num_tokens, num_ranks)
    back = zigzag_permutation(num_tokens, num_ranks, inverse=True)
    np.testing.assert_array_equal(order[back], np.arange(num_tokens))
    first, last = (per_rank + 1) // 2, per_rank // 2
    lengths = [first] * num_ranks + [last] * num_ranks
    blocks = np.split(np.arange(num_tokens), np.cumsum(lengths)[:-1])
    want = [blocks[i] for rank in range(num_ranks) for i in (rank, 2 * num_ranks - 1 - rank)]
    np.testing.assert_array_equal(order, np.concatenate(want))


@pytest.mark.parametrize("num_tokens, num_ranks", [(7, 2), (4, 0), (-2, 2)])
def test_tokens_that_cannot_be_split_are_rejected(num_tokens, num_ranks):
    with pytest.raises(ValueError, match=f"{num_tokens} tokens cannot be split over {num_ranks}"):
        zigzag_permutation(num_tokens, num_ranks)
