"""Invalid calls of plans and of what surrounds products.

Of attention: test_refusals_attention.py; of movement: test_dispatch_refusals.py; of products:
test_comm_gemm_errors.py.
"""

from typing import Any, cast

import jax
import numpy as np
import pytest
from refusals import (
    IDS,
    LENGTHS,
    NO_PLAN,
    WHERE,
    S,
    W,
    X,
    check_names,
    check_rejected,
)

import jax_cp_dispatch as cp

pytestmark = pytest.mark.usefixtures("unchecked_types")

PLAN, _ = cp.compute_metadata(LENGTHS, WHERE)
KEY = jax.random.key(0)
SCALES: Any = np.ones((128, 4), np.uint8)
DELAYED = cp.scaling.DelayedScaling.init()


def plan_of(**fields: Any) -> cp.Metadata:
    return cp.Metadata(**{**vars(PLAN), **fields})


def gen_seq_lens(num_seqs: Any = 4, total_len: Any = 8):
    return cp.scenarios.gen_seq_lens(KEY, 2, num_seqs, total_len)


def plan(segment_ids: Any = IDS, positions: Any = None, world_size: Any = W, **options: Any):
    return cp.plan_attention(segment_ids, positions, world_size=world_size, **options)


def overlap_buffer(
    comm_type="AG", method="ring_exchange", shape=(8, 4), dtype="float32", **options
):
    return cp.buffers.create_comm_overlap_buffer(comm_type, method, shape, dtype, W, **options)


def choose(**options: Any):
    shape = cp.cost.CommGemmShape("all_gather_matmul", 8, 8, 8, W, 4)
    return cp.choose_comm_gemm(shape, **options)


def quantize(x: Any, **options: Any):
    return cp.scaling.quantize(x, "DELAYED_TENSOR_SCALING", **{"state": DELAYED, **options})


def unpad(shape: Any):
    return cp.scaling.unpad_scales(SCALES, shape=shape)


# Name, call, and the message after "<operation>: ".
CASES = [
    # Plans.
    ("compute_metadata", lambda: cp.compute_metadata(LENGTHS * 1.0, WHERE), "dtype float.*integer"),
    ("compute_metadata", lambda: cp.compute_metadata(LENGTHS[0], WHERE), r"shape \(2,\).*\[W, S\]"),
    (
        "compute_metadata",
        lambda: cp.compute_metadata(LENGTHS, WHERE[:2]),
        r"shape \(2, 2\); it",
    ),
    (
        "compute_metadata",
        lambda: cp.compute_metadata(LENGTHS, WHERE + W),
        r"is \d; it needs to",
    ),
    ("compute_metadata", lambda: cp.compute_metadata(-LENGTHS, WHERE), r"is -3; it needs to lie"),
    (
        "compute_metadata",
        lambda: cp.compute_metadata(LENGTHS, 0 * WHERE, max_recv_seqs=2),
        "rank 0 would receive 8 shards but max_recv_seqs is 2. Pass",
    ),
    (
        "compute_metadata",
        lambda: jax.eval_shape(cp.compute_metadata, LENGTHS, WHERE),
        "traced values. Pass max_recv_seqs",
    ),
    (
        "compute_attn_layout_seqlens",
        lambda: cp.metadata.compute_attn_layout_seqlens(LENGTHS, LENGTHS[:, :1], WHERE),
        r"shape \(4, 1\); it needs",
    ),
    (
        "Metadata.validate",
        lambda: plan_of(dst_offset=np.zeros((W, S), np.uint32)).validate(),
        "dst_offset 0 with seq_len 3 overlaps the rows below 3 that rank 0 receives",
    ),
    ("Metadata.validate", lambda: plan_of(dst_rank=WHERE + 9).validate(), r"dst_rank.*9"),
    ("plan_attention", lambda: plan(IDS * 1.0), "dtype float.*integer"),
    ("plan_attention", lambda: plan(IDS[0]), r"shape \(16,\).*segment_ids\[None\]"),
    ("plan_attention", lambda: plan(-IDS), "is -1; it needs to be at least 0. Mark"),
    ("plan_attention", lambda: plan(world_size=5), "cannot be split.*Pad the columns"),
    ("plan_attention", lambda: plan(positions=IDS[:, :3]), "Pass equal shapes"),
    ("plan_attention", lambda: plan(mask="no"), "mask is .no.; it needs to be .causal."),
    ("SlidingWindow", lambda: cp.masks.SlidingWindow(0), "left is 0; it needs to be at least 1"),
    (
        "SlidingWindow",
        lambda: cp.masks.SlidingWindow(3, -1),
        "right is -1.*at least 0",
    ),
    (
        "SlidingWindow",
        lambda: cp.masks.SlidingWindow(cast(Any, 2.5)),
        "left is 2.5; it needs to be an int",
    ),
    ("Chunked", lambda: cp.masks.Chunked(0), "size is 0; it needs to be at least 1"),
    (
        "Chunked",
        lambda: cp.masks.Chunked(cast(Any, None)),
        "size is None; it needs to be an int",
    ),
    (
        "plan_attention",
        lambda: plan(np.array([[1, 2, 1, 2]]), world_size=2),
        "separate runs.*own segment id",
    ),
    (
        "plan_attention",
        lambda: plan(config=cp.PlanConfig(block=2, kv_capacity=1)),
        r"kv_capacity is 1. Pass kv_capacity>=\d+",
    ),
    ("plan_attention", lambda: plan([[1, 2]]), r"type list.*Pass numpy.asarray\(segment_ids\)"),
    ("plan_attention", lambda: plan(positions=[0]), "positions is of type list"),
    ("plan_attention", lambda: plan(config=None), "config is None; it needs to be a PlanConfig"),
    ("plan_attention", lambda: plan(world_size=2.0), "world_size is 2.0; it needs to be an int"),
    (
        "PlanConfig",
        lambda: cp.PlanConfig(block=cast(Any, 1.5)),
        "block is 1.5; it needs to be an integer",
    ),
    ("PlanConfig", lambda: cp.PlanConfig(kv_capacity=True), "kv_capacity is True; it needs"),
    ("PlanConfig", lambda: cp.PlanConfig(block=0), "block is 0; it needs to be at least 1"),
    (
        "gen_seq_lens",
        lambda: cp.scenarios.gen_seq_lens(KEY, 0, 4, 8),
        "world_size is 0; it needs to be at least 1",
    ),
    (
        "gen_seq_lens",
        lambda: gen_seq_lens(total_len=10.5),
        "total_len is 10.5; it needs to be",
    ),
    (
        "gen_seq_lens",
        lambda: cp.scenarios.gen_seq_lens(KEY, True, 4, 8),
        "world_size is True; it needs to be an int",
    ),
    (
        "gen_seq_lens",
        lambda: gen_seq_lens(num_seqs=2.0),
        "num_seqs is 2.0; it needs to be",
    ),
    (
        "create_qkv_dispatch",
        lambda: cp.scenarios.create_qkv_dispatch(KEY, 0, 8, 1, 4),
        "world_size is 0; it needs to be at least 1",
    ),
    (
        "gen_seq_lens",
        lambda: cp.scenarios.gen_seq_lens(KEY, 2, 4, 3),
        "total_len 3.*Pass total_len>=4",
    ),
    (
        "create_qkv_dispatch",
        lambda: cp.scenarios.create_qkv_dispatch(KEY, 2, 10, 1, 4),
        "10 is not divisible.*Pass a multiple of 4",
    ),
    (
        "orchestrate_simulate",
        lambda: cp.scenarios.orchestrate_simulate(X, X[:1], PLAN),
        r"shape \(1, 6, 2\); it needs all 4 ranks",
    ),
    (
        "orchestrate_simulate",
        lambda: cp.scenarios.orchestrate_simulate(X, X, NO_PLAN),
        "is ndarray; it needs",
    ),
    # Overlapped products.
    ("create_comm_overlap_buffer", lambda: overlap_buffer("no"), "comm_type is 'no'; it needs"),
    ("create_comm_overlap_buffer", lambda: overlap_buffer(shape=(8,)), r"is \(8,\); it needs"),
    ("create_comm_overlap_buffer", lambda: overlap_buffer(num_splits=0), "is 0; it needs"),
    ("choose_comm_gemm", lambda: cp.choose_comm_gemm(NO_PLAN), "type ndarray.*CommGemmShape. Pass"),
    ("choose_comm_gemm", lambda: choose(hardware="h100"), "type str.*needs to be of type Hardware"),
    ("choose_comm_gemm", lambda: choose(table={}), "table is of type dict.*TuningTable. Pass"),
    ("use_tuning", lambda: cp.profiling.use_tuning(cast(Any, "a")), "type str.*TuningTable. Pass"),
    (
        "overlap_profile",
        lambda: cp.profiling.overlap_profile(NO_PLAN),
        "type ndarray.*a function",
    ),
    ("quantize", lambda: quantize([1.0]), r"x is of type list.*Pass numpy.asarray\(x\)"),
    ("quantize", lambda: quantize(X, state=3), r"type int.*DelayedScaling. Begin"),
    ("dequantize", lambda: cp.scaling.dequantize(NO_PLAN), "type ndarray.*Quantized. Pass"),
    ("pad_scales", lambda: cp.scaling.pad_scales(cast(Any, [[1]])), "scales is of type list"),
    (
        "swizzle_scales",
        lambda: cp.scaling.swizzle_scales(cast(Any, X)),
        r"\(4, 6, 2\).*\[r, c\]",
    ),
    (
        "unswizzle_scales",
        lambda: cp.scaling.unswizzle_scales(cast(Any, X)),
        r"\(4, 6, 2\).*512",
    ),
    ("unpad_scales", lambda: unpad(shape=3), "shape is 3; it needs to be a tuple"),
    ("unpad_scales", lambda: unpad(shape=(1.5, 2)), "entry of shape is 1.5; it needs"),
    (
        "destroy_comm_overlap_buffer",
        lambda: cp.buffers.destroy_comm_overlap_buffer(-3),
        "is -3; it needs",
    ),
]


def test_the_list_is_of_public_functions():
    check_names(CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    check_rejected(*CASES[index])
