"""Properties of every valid plan, on random inputs of a few static shapes."""

from typing import Any

import jax
import metadata_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from properties import examples

from jax_cp_dispatch import compute_metadata
from jax_cp_dispatch.metadata import compute_attn_layout_seqlens, compute_metadata_kv
from jax_cp_dispatch.scenarios import orchestrate_simulate

SHAPES = [(3, 4, None), (4, 3, 3)]
MAX_LEN = 7
FEATURE = 2

seeds = st.integers(0, 2**32 - 1)
bounded = examples(10)


def tokens(rng, seq_len, capacity):
    """Returns rows of every rank; rows outside shards are poisoned."""
    x = rng.standard_normal((len(seq_len), capacity, FEATURE)).astype(np.float32)
    x[np.arange(capacity) >= seq_len.sum(1)[:, None]] = np.nan
    return x


def poison(world_size, capacity):
    return np.full((world_size, capacity, FEATURE), np.nan, np.float32)


def slots(shape):
    """Returns enough reverse slots, so all examples of one shape share a program."""
    world_size, num_shards, num_replicas = shape
    return world_size * num_shards * (num_replicas or 1)


def draw(seed, shape):
    rng = np.random.default_rng(seed)
    world_size, num_shards, num_replicas = shape
    return rng, *oracle.random_shards(rng, world_size, num_shards, num_replicas, MAX_LEN)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@bounded
@given(seed=seeds)
def test_plans_equal_the_oracle_and_are_valid(seed, shape):
    _, seq_len, dispatch = draw(seed, shape)
    bound = slots(shape)
    plans = compute_metadata(seq_len, dispatch, max_recv_seqs=bound)
    for plan, fields in zip(plans, oracle.plan(seq_len, dispatch, bound), strict=True):
        oracle.assert_fields(plan, fields)
        plan.validate()  # sent = received per pair; ranges are disjoint and without gaps
    if dispatch.ndim == 2:
        arguments = seq_len, seq_len + 1, dispatch
        lengths = compute_attn_layout_seqlens(*arguments, max_recv_seqs=bound)
        oracle.assert_fields(lengths, oracle.attn_layout(*arguments, bound))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@bounded
@given(seed=seeds)
def test_forward_then_reverse_is_the_identity_on_what_was_sent(seed, shape):
    rng, seq_len, dispatch = draw(seed, shape)
    world_size, num_shards, num_replicas = shape
    copies = num_replicas or 1
    capacity = num_shards * MAX_LEN
    forward, reverse = compute_metadata(seq_len, dispatch, max_recv_seqs=slots(shape))
    x = tokens(rng, seq_len, capacity)
    there = orchestrate_simulate(x, poison(world_size, capacity * world_size * copies), forward)
    received = np.all(np.isfinite(there), axis=-1)
    np.testing.assert_array_equal(received.sum(1), forward.num_total_recv_tokens)
    assert np.all(np.sort(~received, axis=1) == ~received), "gaps"

    back = np.asarray(orchestrate_simulate(there, poison(world_size, copies * capacity), reverse))
    want = poison(world_size, copies * capacity)
    replicas = dispatch.reshape(world_size, num_shards, copies)
    for r, s, c in np.argwhere(replicas >= 0):
        home, n = seq_len[r, :s].sum(), seq_len[r, s]
        row = c * seq_len[r].sum() + home
        want[r, row : row + n] = x[r, home : home + n]
    np.testing.assert_array_equal(back, want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@bounded
@given(seed=seeds)
def test_adjoint(seed, shape):
    """<simulate(x), y> = <x, its transpose of y>, in integers small enough to be exact."""
    rng, seq_len, dispatch = draw(seed, shape)
    world_size, num_shards, num_replicas = shape
    capacity, rows = num_shards * MAX_LEN, num_shards * MAX_LEN * world_size * (num_replicas or 1)
    forward, _ = compute_metadata(seq_len, dispatch, max_recv_seqs=slots(shape))
    x = rng.integers(-8, 9, (world_size, capacity, FEATURE)).astype(np.float32)
    y = rng.integers(-8, 9, (world_size, rows, FEATURE)).astype(np.float32)
    there, transpose = jax.vjp(lambda x: orchestrate_simulate(x, np.zeros_like(y), forward), x)
    (back,) = transpose(y)
    assert np.vdot(there, y) == np.vdot(x, back)


@pytest.mark.parametrize("size", [(3, 5, 3)], ids=str)
@bounded
@given(seed=seeds)
def test_kv_round_trip_reproduces_every_replica(seed, size):
    rng = np.random.default_rng(seed)
    world_size, num_shards, copies = size
    arguments = oracle.spanning_documents(rng, *size)
    *rest, seq_len, q_dispatch = arguments
    bound = slots(size)
    call: tuple[Any, ...] = (*rest, seq_len, np.zeros(world_size, int), q_dispatch)
    forward, reverse = compute_metadata_kv(*call, max_recv_seqs=bound)
    for plan, fields in zip(
        (forward, reverse), oracle.plan_kv(*arguments, num_slots=bound), strict=True
    ):
        oracle.assert_fields(plan, fields)

    capacity = num_shards * MAX_LEN
    x = tokens(rng, seq_len, capacity)
    there = orchestrate_simulate(x, poison(world_size, bound * MAX_LEN), forward)
    back = np.asarray(orchestrate_simulate(there, poison(world_size, copies * capacity), reverse))
    for r, s, c in np.argwhere(np.asarray(reverse.seq_recv_mask)):
        home, n = seq_len[r, :s].sum(), seq_len[r, s]
        row = c * seq_len[r].sum() + home
        np.testing.assert_array_equal(back[r, row : row + n], x[r, home : home + n])
    moved = (np.asarray(reverse.seq_recv_mask) * seq_len[..., None]).sum()
    assert np.isfinite(back).all(-1).sum() == moved, "padding moved"
