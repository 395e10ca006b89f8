"""A Metadata object by example: views, dtypes, derived fields and validation."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import metadata_oracle as oracle
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import Metadata, compute_metadata, dispatch

SEQ_LEN = np.array([[4, 0, 6], [3, 5, 0]])
DISPATCH = np.array([[1, 0, 0], [0, 1, -1]])
MESH = Mesh(np.array(jax.devices()[:2]), ("cp",))


def plans(seq_len, dispatch) -> list[Any]:
    """The forward and the reverse plan, by NumPy: compiles nothing."""
    return [Metadata(**x, world_size=len(seq_len)) for x in oracle.plan(seq_len, dispatch)]


def by_numpy(dtype: Any = np.int64, **changes: Any):
    plan = jax.tree.map(lambda x: np.asarray(x, dtype), plans(SEQ_LEN, DISPATCH)[0])
    return dataclasses.replace(plan, **changes)


# --- views ----------------------------------------------------------------------------------


def test_get_slice_outside_jit_and_in_shard_map():
    plan, _ = plans(*oracle.random_shards(np.random.default_rng(0), 4, 5, 2))
    mesh = Mesh(np.array(jax.devices()[:4]), ("cp",))
    ways = {
        "global": (P(), lambda m: m.get_slice(jax.lax.axis_index("cp"))),
        "row": (P("cp"), lambda m: m.get_slice(jax.lax.axis_index("cp"))),
        "local_view of global": (P(), lambda m: m.local_view(jax.lax.axis_index("cp"))),
        "local_view of a row": (P("cp"), lambda m: m.local_view(jax.lax.axis_index("cp"))),
    }

    @jax.jit
    def rows_of_all_ranks(plan):
        return {
            way: jax.shard_map(
                lambda m, view=view: jax.tree.map(lambda x: x[None], view(m)),
                mesh=mesh,
                in_specs=specs,
                out_specs=P("cp"),
            )(plan)
            for way, (specs, view) in ways.items()
        }

    for way, rows in rows_of_all_ranks(plan).items():
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=way), rows, plan)
    one = plan.get_slice(np.int64(2))
    assert one.num_recv_tokens.shape == (5,) and one.num_seqs.shape == ()
    assert one.local_view(0) is one
    one.validate()


def test_get_slice_has_the_numbers_of_one_rank_without_padding():
    rng = np.random.default_rng(3)
    for num_replicas in (1, 3):
        plan, reverse = plans(*oracle.random_shards(rng, 4, 6, num_replicas))
        for metadata in (plan, reverse):
            for rank, end in enumerate(np.asarray(metadata.num_seqs)):
                view = metadata.get_slice(rank)
                view.validate()
                for name in ("dst_rank", "dst_offset", "seq_len"):
                    whole = np.asarray(getattr(metadata, name))[rank]
                    np.testing.assert_array_equal(getattr(view, name), whole[:end])
                    assert end == len(whole) or not (whole[end:] > 0).any()
                assert view.num_recv_tokens.shape == (5,)  # one count per rank, and their sum
    mask = jax.jit(lambda rank: reverse.get_slice(rank).seq_recv_mask)(0)
    assert mask.dtype == reverse.get_slice(0).seq_recv_mask.dtype == bool
    starts = dataclasses.replace(plan, src_offset=np.zeros(plan.seq_len.shape, np.uint32))
    assert starts.get_slice(1).src_offset.shape == starts.get_slice(1).seq_len.shape
    # Static shapes do not depend on values: padding is kept.
    assert jax.jit(lambda m: m.get_slice(0))(plan).seq_len.shape == plan.seq_len.shape[1:]


def test_views_reject_plans_without_all_ranks():
    plan = by_numpy()
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 2\)"):
        plan.get_slice(2)
    with pytest.raises(ValueError, match="local_view"):
        plan.get_slice(0).get_slice(0)


def test_device_put_shards_every_field():
    placed = by_numpy(np.int32).device_put(NamedSharding(MESH, P("cp")))
    assert all(len(x.sharding.device_set) == 2 for x in jax.tree.leaves(placed))
    assert isinstance(by_numpy(np.int32).device_put(), Metadata)


# --- dtypes ---------------------------------------------------------------------------------


def test_normalize_dtype():
    wide = by_numpy()
    plan = wide.normalize_dtype()
    assert plan.normalized
    assert plan.dst_rank.dtype == jnp.int32 and plan.seq_len.dtype == jnp.uint32
    assert plan.num_recv_tokens.dtype == jnp.uint32
    with jax.enable_x64(True):
        assert wide.normalize_dtype().num_recv_tokens.dtype == jnp.uint64
    assert jax.jit(lambda m: m.normalize_dtype())(plan).normalized


def test_normalize_dtype_checks_the_range():
    big = np.array([2**32, 5])
    with pytest.raises(ValueError, match=r"num_total_recv_tokens\[0\] is 4294967296.*enable x64"):
        by_numpy(num_total_recv_tokens=big).normalize_dtype()


@pytest.mark.parametrize("name", ["dst_rank", "dst_offset", "seq_len", "num_recv_tokens"])
def test_numbers_that_jax_would_cut_are_refused(name):
    plan = by_numpy()
    wrong = dataclasses.replace(plan, **{name: getattr(plan, name) + 2**32})
    with pytest.raises(ValueError, match=rf"Metadata.get_slice: {name}\[0, 0\] is 4\d+; it needs"):
        jax.eval_shape(wrong.get_slice, jnp.int32(0))
    with pytest.raises(ValueError, match=rf"dispatch: metadata.{name}\[0, 0\] is 4\d+; it needs"):
        dispatch(np.ones((20, 3)), wrong, axis_name="cp", capacity=20, mesh=MESH)


def test_traced_numbers_stay_invalid():
    """As those beyond 32 bits that are known; no rank or length of 64 bits becomes another one."""
    given = [np.asarray(x, np.int64) for x in (SEQ_LEN, DISPATCH)]
    run = jax.jit(partial(compute_metadata, max_recv_seqs=9))
    with jax.enable_x64(True):
        for wrong, number in itertools.product((2**32, -(2**32)), range(2)):
            plan, _ = run(*(x + wrong * (i == number) for i, x in enumerate(given)))
            with pytest.raises(ValueError, match=r"Metadata.validate"):
                plan.validate()


# --- derived fields --------------------------------------------------------------------------


def test_omitted_totals_are_derived():
    rng = np.random.default_rng(5)
    for as_array, num_replicas in ((np.asarray, 1), (jnp.asarray, 2)):
        plan, _ = plans(*oracle.random_shards(rng, 3, 4, num_replicas))
        names = ("dst_rank", "dst_offset", "seq_len", "num_recv_tokens")
        given: Any = {name: as_array(getattr(plan, name)) for name in names}
        derived = Metadata(**given, world_size=3)
        derived.validate()
        np.testing.assert_array_equal(derived.num_seqs, plan.num_seqs)
        np.testing.assert_array_equal(derived.num_total_recv_tokens, plan.num_total_recv_tokens)
        traced = jax.jit(lambda fields: Metadata(**fields, world_size=3))(given)
        jax.tree.map(np.testing.assert_array_equal, traced, derived)


def test_a_plan_of_placeholders_is_unchanged():
    specs = Metadata(dst_rank=0, dst_offset=0, seq_len=0, num_recv_tokens=0, world_size=2)
    assert specs.num_seqs is None and specs.num_total_recv_tokens is None
    none = dict.fromkeys(("dst_rank", "dst_offset", "seq_len"), np.zeros((2, 0), int))
    none = Metadata(**none, num_recv_tokens=np.zeros((2, 3), int), world_size=2)
    none.validate()
    np.testing.assert_array_equal(none.num_seqs, [0, 0])


# --- validate -------------------------------------------------------------------------------


def changed(name, index, value):
    field = np.array(getattr(by_numpy(), name))
    field[index] = value
    return by_numpy(**{name: field})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: changed("dst_rank", (1, 0), 2), "rank 1, slot 0: dst_rank is 2"),
        (lambda: changed("dst_offset", (0, 2), 1), "rank 0, slot 2: dst_offset 1 .*gap after"),
        (lambda: changed("dst_offset", (1, 1), 9), "rank 1, slot 1: dst_offset 9.*of the 9"),
        (lambda: changed("seq_len", (1, 1), -1), "rank 1, slot 1: seq_len is -1"),
        (lambda: changed("seq_len", (0, 2), 5),
         "rank 0: num_recv_tokens expects 6 tokens of rank 0, .* sums to 5 .*slot 1, 2"),
        (lambda: changed("dst_offset", (0, 1), 10), "slot 1: dst_offset 10 with seq_len 0 ends"),
        (lambda: changed("seq_len", (1, 2), 2**32 - 8), "slot 2: src_offset . seq_len is 429"),
        (lambda: changed("seq_len", (0, 0), 2**32), r"rank 0, slot 0: seq_len .* 4294967295"),
        (lambda: changed("num_seqs", 0, 2), "rank 0: num_seqs is 2"),
        (lambda: changed("num_total_recv_tokens", 1, 8), "rank 1: num_total_recv_tokens is 8"),
        (lambda: by_numpy(num_seqs=np.zeros(3, int)), r"num_seqs has shape \(3,\)"),
        (lambda: by_numpy(seq_len=np.int64(3)), r"seq_len has shape \(\); it needs \[W, S\]"),
        (lambda: by_numpy(recv_seq_lens=np.zeros((2, 3), int), seq_recv_mask=SEQ_LEN > 0),
         r"seq_recv_mask has shape \(2, 3\); it needs that of recv_seq_lens"),
        (lambda: by_numpy(recv_seq_lens=np.zeros(3, int)), r"recv_seq_lens has shape \(3,\)"),
        (lambda: by_numpy(src_offset=np.full((2, 3), 2**32 - 3)), "src_offset . seq_len is 42949"),
        (lambda: by_numpy(dst_offset=np.zeros((2, 3))), "dst_offset has dtype float64"),
        (lambda: by_numpy(src_offset=np.zeros((2, 2), int)), "src_offset has shape"),
        (lambda: by_numpy(world_size=3), "3 leading rows"),
    ],
)  # fmt: skip
def test_validate_names_rank_slot_and_field(plan, message):
    by_numpy().validate()
    with pytest.raises(ValueError, match=message):
        plan().validate()


def test_validate_finds_gaps_and_overlaps_inside_the_buffer():
    plan, _ = plans(np.array([[2, 2, 2]]), np.array([[0, 0, 0]]))
    for offsets, message in (
        ([1, 2, 4], "rank 0, slot 0: dst_offset 1 .* gap after the rows below 0"),
        ([0, 3, 4], "rank 0, slot 1: dst_offset 3 .* gap after the rows below 2"),
        ([0, 2, 3], "rank 0, slot 2: dst_offset 3 .* overlaps the rows below 4"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(plan, dst_offset=np.array([offsets])).validate()


def test_validate_reverse_checks_shards_that_were_not_sent():
    dispatch = np.array([[[-1, 1], [0, -1]], [[1, 1], [-1, 0]]])
    _, reverse = plans(np.array([[2, 3], [4, 1]]), dispatch)
    reverse.validate()
    moved = np.array(reverse.dst_offset)
    moved[0, 0] = 5  # where replica 0 of an unsent shard would return
    with pytest.raises(ValueError, match="slot 0: dst_offset 5 "):
        dataclasses.replace(reverse, dst_offset=moved).validate()
    mask = np.array(reverse.seq_recv_mask)
    mask[0, 0, 0] = True
    with pytest.raises(ValueError, match="no rank returns rows"):
        dataclasses.replace(reverse, seq_recv_mask=mask).validate()


def test_validate_rejects_traced_values():
    with pytest.raises(TypeError, match="Validate on the host"):
        jax.jit(lambda m: m.validate())(by_numpy(np.int32))
