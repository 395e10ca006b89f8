"""Metadata by example: planning against the oracle, views, dtypes, validation and errors."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import metadata_oracle as oracle
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import Metadata, compute_metadata
from jax_cp_dispatch.metadata import compute_attn_layout_seqlens, compute_metadata_kv

SEQ_LEN = np.array([[4, 0, 6], [3, 5, 0]])
DISPATCH = np.array([[1, 0, 0], [0, 1, -1]])


def kv_arguments(seed=0, world_size=3, num_shards=5, num_replicas=4) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    *rest, q_dispatch = oracle.spanning_documents(rng, world_size, num_shards, num_replicas)
    num_seqs = oracle.last_used((rest[5] > 0) | (rest[1] >= 0).any(-1))
    return (*rest, num_seqs, q_dispatch)


def without_num_seqs(arguments) -> tuple[Any, ...]:
    return (*arguments[:6], arguments[7])


# --- planning -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "num_shards", "num_replicas"),
    [(1, 1, None), (1, 6, 3), (6, 1, 1), (3, 5, None), (4, 65, None), (4, 23, 3)],
)
def test_plan_equals_oracle(world_size, num_shards, num_replicas):
    rng = np.random.default_rng(world_size * num_shards)
    seq_len, dispatch = oracle.random_shards(rng, world_size, num_shards, num_replicas)
    plans = compute_metadata(seq_len, dispatch)
    for plan, expected in zip(plans, oracle.plan(seq_len, dispatch), strict=True):
        oracle.assert_fields(plan, expected)
        plan.validate()


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 4), (5, 30, 3)])
def test_kv_plan_of_documents_that_span_ranks(size):
    arguments = kv_arguments(7, *size)
    plans = compute_metadata_kv(*arguments)
    expected = oracle.plan_kv(*without_num_seqs(arguments), num_slots=plans[1].seq_len.shape[1])
    for plan, fields in zip(plans, expected, strict=True):
        oracle.assert_fields(plan, fields)
        plan.validate()


def test_kv_counts_by_the_rank_of_the_key():
    # One document of two shards; the key on rank 0 serves the query on rank 1, which goes to 1.
    forward, _ = compute_metadata_kv(
        np.array([[[[0, 0], [1, 0]]], [[[1, 0], [-1, -1]]]]), np.array([[[0, 0]], [[1, -1]]]),
        np.array([[0], [4]]), np.array([[1], [2]]), np.array([[4], [7]]), np.array([[4], [3]]),
        np.array([1, 1]), np.array([[0], [1]]),
    )  # fmt: skip
    np.testing.assert_array_equal(forward.num_recv_tokens, [[4, 0, 4], [4, 3, 7]])


@pytest.mark.parametrize(("world_size", "num_shards"), [(1, 1), (3, 4), (4, 70)])
def test_attention_lengths(world_size, num_shards):
    rng = np.random.default_rng(num_shards)
    shard_len, dispatch = oracle.random_shards(rng, world_size, num_shards)
    context = shard_len + rng.integers(0, 9, shard_len.shape)  # also in padding: ignored
    got = compute_attn_layout_seqlens(shard_len, context, dispatch)
    for name, want in oracle.attn_layout(shard_len, context, dispatch).items():
        np.testing.assert_array_equal(np.asarray(getattr(got, name)), want, err_msg=name)
        assert getattr(got, name).dtype == jnp.int32


def test_dtypes_and_static_fields():
    forward, reverse = compute_metadata(SEQ_LEN, DISPATCH[..., None])
    for plan in (forward, reverse):
        assert plan.world_size == 2
        for name in ("dst_rank", "num_seqs"):
            assert getattr(plan, name).dtype == jnp.int32
        for name in ("dst_offset", "seq_len", "num_recv_tokens", "num_total_recv_tokens"):
            assert getattr(plan, name).dtype == jnp.uint32
    assert reverse.seq_recv_mask.dtype == jnp.bool_
    assert reverse.recv_seq_lens.dtype == jnp.uint32
    assert forward.src_offset is None and forward.seq_recv_mask is None


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_any_integer_dtype_of_numpy_and_jax(dtype):
    unsigned = np.issubdtype(dtype, np.unsignedinteger)
    dispatch = DISPATCH.clip(0).astype(dtype) if unsigned else DISPATCH.astype(dtype)
    for make in (np.asarray, jnp.asarray):
        plan, _ = compute_metadata(make(SEQ_LEN.astype(dtype)), make(dispatch))
        oracle.assert_fields(plan, oracle.plan(SEQ_LEN, dispatch.astype(int))[0])


def test_either_component_of_the_mapping_marks_an_unused_replica():
    mapping, *rest = kv_arguments()
    half = mapping.copy()
    unused = half[..., 0] < 0
    half[..., 1] = np.where(unused, 2, half[..., 1])
    for plan, same in zip(*(compute_metadata_kv(x, *rest) for x in (mapping, half)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, plan, same)


def test_slots_in_use_counts_gaps_and_rows_that_stay():
    plan, _ = compute_metadata(
        np.array([[0, 3, 0], [2, 0, 0], [0, 4, 0]]),
        np.array([[-1, 0, 2], [-1, -1, -1], [0, 0, -1]]),
    )
    np.testing.assert_array_equal(plan.num_seqs, [3, 1, 2])


def test_traced_equals_concrete_also_under_vmap():
    plans = compute_metadata(SEQ_LEN, DISPATCH)
    slots = plans[1].dst_rank.shape[1]

    def call(seq_len, dispatch):
        return compute_metadata(seq_len, dispatch, max_recv_seqs=slots)

    batch = jax.jit(jax.vmap(call))(np.stack([SEQ_LEN, SEQ_LEN * 2]), np.stack([DISPATCH] * 2))
    traced = jax.jit(call)(SEQ_LEN, DISPATCH)
    for plan, one, many in zip(plans, traced, batch, strict=True):
        jax.tree.map(np.testing.assert_array_equal, plan, one)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[0]), plan, many)


def test_constants_inside_jit_are_planned_exactly():
    @jax.jit
    def inside(x):
        _, reverse = compute_metadata(SEQ_LEN, DISPATCH)
        reverse.validate()  # still concrete, so host functions work
        return x + reverse.num_seqs

    np.testing.assert_array_equal(inside(0), [3, 2])


def test_kv_and_lengths_trace():
    arguments = kv_arguments()
    plans = compute_metadata_kv(*arguments)
    slots = plans[1].dst_rank.shape[1]
    traced = jax.jit(lambda a: compute_metadata_kv(*a, max_recv_seqs=slots))(arguments)
    jax.tree.map(np.testing.assert_array_equal, plans, traced)
    lengths = jax.jit(lambda a, b, c: compute_attn_layout_seqlens(a, b, c, max_recv_seqs=4))
    assert lengths(SEQ_LEN, SEQ_LEN, DISPATCH).cu_seqlens_q.shape == (2, 5)


def test_traced_overflow_drops_slots_but_not_counts():
    seq_len, dispatch = np.full((3, 2), 4), np.full((3, 2), 2)
    _, reverse = jax.jit(lambda x, d: compute_metadata(x, d, max_recv_seqs=4))(seq_len, dispatch)
    np.testing.assert_array_equal(reverse.num_seqs, [0, 0, 6])
    np.testing.assert_array_equal(reverse.num_total_recv_tokens, [8, 8, 8])
    np.testing.assert_array_equal(reverse.dst_rank, [[-1] * 4, [-1] * 4, [0, 0, 1, 1]])
    with pytest.raises(ValueError, match="rank 2: num_seqs is 6"):
        reverse.validate()
    arguments = kv_arguments()
    _, exact = compute_metadata_kv(*arguments)
    need = int(np.max(exact.num_seqs))
    _, short = jax.jit(lambda a: compute_metadata_kv(*a, max_recv_seqs=need - 1))(arguments)
    assert int(np.max(short.num_seqs)) == need


# --- views ----------------------------------------------------------------------------------


def test_get_slice_outside_jit_and_in_shard_map():
    plan, _ = compute_metadata(*oracle.random_shards(np.random.default_rng(0), 4, 5, 2))
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
        plan, reverse = compute_metadata(*oracle.random_shards(rng, 4, 6, num_replicas))
        for metadata in (plan, reverse):
            for rank, end in enumerate(np.asarray(metadata.num_seqs)):
                view = metadata.get_slice(rank)
                view.validate()
                for name in ("dst_rank", "dst_offset", "seq_len"):
                    whole = np.asarray(getattr(metadata, name))[rank]
                    np.testing.assert_array_equal(getattr(view, name), whole[:end])
                    assert end == len(whole) or not (whole[end:] > 0).any()
                assert view.num_recv_tokens.shape == (5,)  # one count per rank, and their sum
    starts = dataclasses.replace(plan, src_offset=np.zeros(plan.seq_len.shape, np.uint32))
    assert starts.get_slice(1).src_offset.shape == starts.get_slice(1).seq_len.shape
    # Static shapes do not depend on values: padding is kept.
    assert jax.jit(lambda m: m.get_slice(0))(plan).seq_len.shape == plan.seq_len.shape[1:]


def test_a_slice_of_an_idle_rank_is_empty():
    plan, _ = compute_metadata(np.array([[0, 0], [2, 0]]), np.array([[-1, -1], [0, -1]]))
    assert plan.get_slice(0).dst_rank.shape == (0,)
    assert plan.get_slice(1).dst_rank.shape == (1,)


def test_views_reject_plans_without_all_ranks():
    plan, _ = compute_metadata(SEQ_LEN, DISPATCH)
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 2\)"):
        plan.get_slice(2)
    with pytest.raises(ValueError, match="local_view"):
        plan.get_slice(0).get_slice(0)


def test_one_rank():
    plan, reverse = compute_metadata(np.array([[3, 2]]), np.array([[0, 0]]))
    for view in (plan.local_view(0), plan.get_slice(0)):
        np.testing.assert_array_equal(view.dst_offset, [0, 3])
    reverse.validate()


def test_device_put_shards_every_field():
    plan, _ = compute_metadata(SEQ_LEN, DISPATCH)
    mesh = Mesh(np.array(jax.devices()[:2]), ("cp",))
    placed = plan.device_put(NamedSharding(mesh, P("cp")))
    assert all(len(x.sharding.device_set) == 2 for x in jax.tree.leaves(placed))
    assert isinstance(plan.device_put(), Metadata)


# --- dtypes ---------------------------------------------------------------------------------


def numpy_plan(dtype: Any = np.int64, **changes: Any):
    plan, _ = compute_metadata(SEQ_LEN, DISPATCH)
    plan = jax.tree.map(lambda x: np.asarray(x, dtype), plan)
    return dataclasses.replace(plan, **changes)


def test_normalize_dtype():
    wide = numpy_plan()
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
        numpy_plan(num_total_recv_tokens=big).normalize_dtype()


# --- derived fields --------------------------------------------------------------------------


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_omitted_totals_are_derived(as_array):
    rng = np.random.default_rng(5)
    for num_replicas in (1, 2):
        plan, _ = compute_metadata(*oracle.random_shards(rng, 3, 4, num_replicas))
        given = {
            name: as_array(getattr(plan, name))
            for name in ("dst_rank", "dst_offset", "seq_len", "num_recv_tokens")
        }
        derived = Metadata(**given, world_size=3)
        derived.validate()
        np.testing.assert_array_equal(derived.num_seqs, plan.num_seqs)
        np.testing.assert_array_equal(derived.num_total_recv_tokens, plan.num_total_recv_tokens)
        traced = jax.jit(lambda fields: Metadata(**fields, world_size=3))(given)
        jax.tree.map(np.testing.assert_array_equal, traced, derived)


def test_a_plan_of_placeholders_is_unchanged():
    specs = Metadata(dst_rank=0, dst_offset=0, seq_len=0, num_recv_tokens=0, world_size=2)
    assert specs.num_seqs is None and specs.num_total_recv_tokens is None
    none = Metadata(
        dst_rank=np.zeros((2, 0), int),
        dst_offset=np.zeros((2, 0), int),
        seq_len=np.zeros((2, 0), int),
        num_recv_tokens=np.zeros((2, 3), int),
        world_size=2,
    )
    none.validate()
    np.testing.assert_array_equal(none.num_seqs, [0, 0])


# --- validate -------------------------------------------------------------------------------


def changed(name, index, value):
    field = np.array(getattr(numpy_plan(), name))
    field[index] = value
    return numpy_plan(**{name: field})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: changed("dst_rank", (1, 0), 2), "rank 1, slot 0: dst_rank is 2"),
        (lambda: changed("dst_offset", (0, 2), 1), "rank 0, slot 2: dst_offset 1 .*gap after"),
        (lambda: changed("dst_offset", (1, 1), 9), "rank 1, slot 1: dst_offset 9.*of the 9"),
        (lambda: changed("seq_len", (1, 1), -1), "rank 1, slot 1: seq_len is -1"),
        (
            lambda: changed("seq_len", (0, 2), 5),
            "rank 0: num_recv_tokens expects 6 tokens of rank 0, .* sums to 5 .*slot 1, 2",
        ),
        (lambda: changed("dst_offset", (0, 1), 10), "slot 1: dst_offset 10 with seq_len 0 ends"),
        (lambda: changed("seq_len", (1, 2), 2**32 - 8), "slot 2: src_offset . seq_len is 429"),
        (lambda: changed("seq_len", (0, 0), 2**32), r"rank 0, slot 0: seq_len .* 4294967295"),
        (lambda: changed("num_seqs", 0, 2), "rank 0: num_seqs is 2"),
        (lambda: changed("num_total_recv_tokens", 1, 8), "rank 1: num_total_recv_tokens is 8"),
        (lambda: numpy_plan(num_seqs=np.zeros(3, int)), r"num_seqs has shape \(3,\)"),
        (lambda: numpy_plan(seq_len=np.int64(3)), r"seq_len has shape \(\), needs \[W, S\]"),
        (
            lambda: numpy_plan(recv_seq_lens=np.zeros((2, 3), int), seq_recv_mask=SEQ_LEN > 0),
            r"seq_recv_mask has shape \(2, 3\), needs that of recv_seq_lens",
        ),
        (lambda: numpy_plan(recv_seq_lens=np.zeros(3, int)), r"recv_seq_lens has shape \(3,\)"),
        (
            lambda: numpy_plan(src_offset=np.full((2, 3), 2**32 - 3)),
            "rank 0, slot 0: src_offset . seq_len is 4294967297",
        ),
        (lambda: numpy_plan(dst_offset=np.zeros((2, 3))), "dst_offset has dtype float64"),
        (lambda: numpy_plan(src_offset=np.zeros((2, 2), int)), "src_offset has shape"),
        (lambda: numpy_plan(world_size=3), "3 leading rows"),
    ],
)  # fmt: skip
def test_validate_names_rank_slot_and_field(plan, message):
    numpy_plan().validate()
    with pytest.raises(ValueError, match=message):
        plan().validate()


def test_validate_finds_gaps_and_overlaps_inside_the_buffer():
    plan, _ = compute_metadata(np.array([[2, 2, 2]]), np.array([[0, 0, 0]]))
    for offsets, message in (
        ([1, 2, 4], "rank 0, slot 0: dst_offset 1 .* gap after the rows below 0"),
        ([0, 3, 4], "rank 0, slot 1: dst_offset 3 .* gap after the rows below 2"),
        ([0, 2, 3], "rank 0, slot 2: dst_offset 3 .* overlaps the rows below 4"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(plan, dst_offset=np.array([offsets])).validate()


def test_validate_reverse_checks_shards_that_were_not_sent():
    seq_len, dispatch = (
        np.array([[2, 3], [4, 1]]),
        np.array([[[-1, 1], [0, -1]], [[1, 1], [-1, 0]]]),
    )
    _, reverse = compute_metadata(seq_len, dispatch)
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
        jax.jit(lambda m: m.validate())(numpy_plan(np.int32))


# --- errors of planning ---------------------------------------------------------------------


plan_q, plan_lengths = compute_metadata, compute_attn_layout_seqlens


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plan_q(SEQ_LEN * 1.0, DISPATCH), TypeError, "seq_len has dtype float64"),
        (lambda: plan_q(SEQ_LEN, DISPATCH > 0), TypeError, "dispatch has dtype bool"),
        (lambda: plan_q(SEQ_LEN[0], DISPATCH), ValueError, r"seq_len has shape \(3,\)"),
        (lambda: plan_q(SEQ_LEN, DISPATCH[:, :2]), ValueError, r"needs \[2, 3\] or"),
        (lambda: plan_q(SEQ_LEN, DISPATCH + 1), ValueError, "dispatch at rank 0, slot 0 is"),
        (lambda: plan_q(-SEQ_LEN, DISPATCH), ValueError, "seq_len at rank 0, slot 0 is -4"),
        (lambda: plan_q(SEQ_LEN * 2**29, DISPATCH), ValueError, "needs at most 4294967295"),
        (lambda: plan_q(SEQ_LEN, DISPATCH, max_recv_seqs=2), ValueError, "max_recv_seqs>=3"),
        (lambda: plan_q(SEQ_LEN, DISPATCH, max_recv_seqs=0), ValueError, "at least 1"),
        (lambda: jax.jit(plan_q)(SEQ_LEN, DISPATCH), ValueError, "Pass max_recv_seqs"),
        (lambda: plan_lengths(SEQ_LEN, SEQ_LEN[:1], DISPATCH), ValueError, "shard_context"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda x: x[..., :1], "kv_to_q_mapping has shape"),
        (0, lambda x: np.where(x >= 0, x + 9, x), "kv_to_q_mapping at rank"),
        (1, lambda x: x + 9, "kv_to_q_rank at rank"),
        (2, lambda x: x + 99, "kv_context_size at rank"),
        (4, lambda x: x[:1], "q_to_num_kv_token has shape"),
        (1, lambda x: x.clip(max=0), "kv_to_q_rank at rank .* differ from the other KV shards"),
        (6, lambda x: x + 99, "num_seqs at rank 0"),
        (7, lambda x: x + 9, "q_dispatch at rank 0, slot 0"),
    ],
)
def test_kv_errors_name_the_argument(position, change, message):
    arguments = list(kv_arguments())
    arguments[position] = change(arguments[position])
    with pytest.raises(ValueError, match=message):
        compute_metadata_kv(*arguments)
