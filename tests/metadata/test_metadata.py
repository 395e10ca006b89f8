"""Metadata of lengths and destinations: against the oracle and another implementation."""

import itertools
import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import metadata_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from metadata_oracle import kv_arguments
from properties import examples

from jax_cp_dispatch import compute_metadata
from jax_cp_dispatch.metadata import compute_attn_layout_seqlens, compute_metadata_kv
from jax_cp_dispatch.scenarios import orchestrate_simulate

# ---- Properties of every plan, on random inputs of a few static shapes.

KV_SHAPE = (3, 5, 3)
SHAPES = [(3, 4, None), (4, 3, 3)]
MAX_LEN = 7
FEATURE = 2

DTYPES = {"dst_rank": jnp.int32, "num_seqs": jnp.int32, "seq_recv_mask": jnp.bool_}
DTYPES |= dict.fromkeys(("dst_offset", "seq_len", "num_recv_tokens"), jnp.uint32)
DTYPES |= dict.fromkeys(("num_total_recv_tokens", "recv_seq_lens"), jnp.uint32)
seeds = st.integers(0, 2**32 - 1)
bounded = examples(8)


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
def test_plans_equal_the_oracle_and_reverse_is_the_identity_on_what_was_sent(seed, shape):
    rng, seq_len, dispatch = draw(seed, shape)
    world_size, num_shards, num_replicas = shape
    copies, bound = num_replicas or 1, slots(shape)
    capacity = num_shards * MAX_LEN
    forward, reverse = compute_metadata(seq_len, dispatch, max_recv_seqs=bound)
    for plan, fields in zip((forward, reverse), oracle.plan(seq_len, dispatch, bound), strict=True):
        oracle.assert_fields(plan, fields)
        plan.validate()  # sent = received per pair; ranges are disjoint and without gaps
        assert plan.world_size == world_size
        for name, x in vars(plan).items():
            if name in DTYPES and x is not None:
                assert x.dtype == DTYPES[name], name
    assert forward.src_offset is None and forward.seq_recv_mask is None
    if dispatch.ndim == 2:
        context = seq_len + rng.integers(0, 9, seq_len.shape)  # also in padding: ignored
        lengths = compute_attn_layout_seqlens(seq_len, context, dispatch, max_recv_seqs=bound)
        oracle.assert_fields(lengths, oracle.attn_layout(seq_len, context, dispatch, bound))

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


@bounded
@given(seed=seeds)
def test_kv_round_trip_reproduces_every_replica(seed):
    rng, size = np.random.default_rng(seed), KV_SHAPE
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


# ---- Examples.


def test_compute_metadata_finds_how_many_slots_it_needs():
    seq_len, dispatch = oracle.random_shards(np.random.default_rng(), 4, 65)
    plans = compute_metadata(seq_len, dispatch)
    for plan, expected in zip(plans, oracle.plan(seq_len, dispatch), strict=True):
        oracle.assert_fields(plan, expected)
        plan.validate()


# Of the first of `SHAPES`: rank 2 receives most, 4 shards.
SEQ_LEN = np.array([[4, 0, 6, 1], [3, 5, 0, 2], [1, 1, 2, 0]])
DISPATCH = np.array([[1, 0, 2, 2], [0, 1, -1, 2], [2, 0, 1, -1]])


def test_any_integer_dtype_of_numpy_and_jax():
    for dtype, make in itertools.product((np.int8, np.uint8, np.int64, np.uint32), "nj"):
        unsigned = np.issubdtype(dtype, np.unsignedinteger)
        dispatch = (DISPATCH.clip(0) if unsigned else DISPATCH).astype(dtype)
        given = SEQ_LEN.astype(dtype), dispatch
        given = map(jnp.asarray, given) if make == "j" else given
        plan, _ = compute_metadata(*given, max_recv_seqs=slots(SHAPES[0]))
        oracle.assert_fields(plan, oracle.plan(SEQ_LEN, dispatch.astype(int))[0])


def test_either_component_of_the_mapping_marks_an_unused_replica():
    mapping, *rest = kv_arguments(0, *KV_SHAPE)
    half = mapping.copy()
    unused = half[..., 0] < 0
    half[..., 1] = np.where(unused, 2, half[..., 1])
    options = {"max_recv_seqs": slots(KV_SHAPE)}
    plans, same = (compute_metadata_kv(x, *rest, **options) for x in (mapping, half))
    jax.tree.map(np.testing.assert_array_equal, plans, same)


def test_traced_equals_concrete_under_vmap_and_overflow_drops_slots_but_not_counts():
    plans = compute_metadata(SEQ_LEN, DISPATCH)
    assert plans[1].dst_rank.shape[1] == 4
    call = jax.jit(jax.vmap(partial(compute_metadata, max_recv_seqs=4)))
    everything = np.full_like(DISPATCH, 2)  # in the second batch, to rank 2
    batch = call(np.stack([SEQ_LEN, SEQ_LEN * 2]), np.stack([DISPATCH, everything]))
    for plan, many in zip(plans, batch, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[0]), plan, many)
    reverse = jax.tree.map(lambda x: x[1], batch[1])
    np.testing.assert_array_equal(reverse.num_seqs, [0, 0, 12])
    np.testing.assert_array_equal(reverse.num_total_recv_tokens, 2 * SEQ_LEN.sum(1))
    np.testing.assert_array_equal(reverse.dst_rank, [[-1] * 4, [-1] * 4, [0] * 4])
    with pytest.raises(ValueError, match="rank 2: num_seqs is 12"):
        reverse.validate()


def test_kv_and_lengths_trace():
    arguments = kv_arguments(0, *KV_SHAPE)
    _, exact = compute_metadata_kv(*arguments, max_recv_seqs=slots(KV_SHAPE))
    need = int(np.max(exact.num_seqs))
    _, short = jax.jit(lambda a: compute_metadata_kv(*a, max_recv_seqs=need - 1))(arguments)
    assert int(np.max(short.num_seqs)) == need
    for name in ("dst_rank", "dst_offset", "seq_len"):
        there = getattr(exact, name)[:, : need - 1]
        np.testing.assert_array_equal(getattr(short, name), there)
    np.testing.assert_array_equal(short.num_recv_tokens, exact.num_recv_tokens)
    lengths = partial(compute_attn_layout_seqlens, max_recv_seqs=4)
    assert jax.eval_shape(lengths, SEQ_LEN, SEQ_LEN, DISPATCH).cu_seqlens_q.shape == (3, 5)


def test_constants_inside_jit_are_planned_exactly():
    @jax.jit
    def inside(x):
        _, reverse = compute_metadata(SEQ_LEN, DISPATCH)
        reverse.validate()  # still concrete, so host functions work
        return x + reverse.num_seqs

    np.testing.assert_array_equal(inside(0), [3, 3, 4])


# ---- Recorded results of another implementation; tests/data names the source.

VECTORS = pathlib.Path(__file__).parents[1] / "data" / "metadata"
FILES = sorted(VECTORS.glob("qkv_*.npz"))


def fields(vector, prefix, names):
    return {name: vector[prefix + name] for name in names if prefix + name in vector}


PLAN = ("dst_rank", "dst_offset", "seq_len", "num_recv_tokens", "num_seqs", "num_total_recv_tokens")
HOME = ("seq_recv_mask", "recv_seq_lens")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_scenarios(path):
    vector = dict(np.load(path))
    # This vector lacks the total column.
    vector["kv_rev_num_recv_tokens"] = oracle.with_total(vector["kv_rev_num_recv_tokens"])
    seq_len, dispatch = vector["in_cp_seq_lens"], vector["in_cp_query_dst"]
    context = vector["in_kv_context_size"]
    plans = {
        "q": compute_metadata(seq_len, dispatch),
        "kv": compute_metadata_kv(
            vector["in_kv_to_q_mapping"], vector["in_kv_to_q_rank"], context,
            vector["in_num_kv_to_q"], vector["in_num_total_kv_to_q"], seq_len,
            vector["in_num_cp_shards"], dispatch,
        ),
    }  # fmt: skip
    for name, (forward, reverse) in plans.items():
        oracle.assert_fields(forward, fields(vector, f"{name}_fwd_", PLAN))
        oracle.assert_fields(reverse, fields(vector, f"{name}_rev_", PLAN + HOME))
        forward.validate()
        reverse.validate()

    got = compute_attn_layout_seqlens(seq_len, context + seq_len, dispatch)
    want = {name: vector["attn_fixed_" + name] for name in got._fields if "num" not in name}
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):  # recorded without the leading zero
        want[name] = np.pad(want[name], ((0, 0), (1, 0)))
    want["num_local_seqs"] = vector["attn_fixed_num_local_seqs_recv"]
    oracle.assert_fields(got, want)
