"""Invalid calls of plans, movement and products. Of attention: see test_refusals_attention.py.

Errors in values appear at run time: see test_dispatch_errors.py.
"""

from typing import Any, cast

import jax
import numpy as np
import pytest
from comm_gemm_refusals import trace
from on_mesh import AXIS
from refusals import (
    IDS,
    LENGTHS,
    LHS,
    NO_PLAN,
    RHS,
    WHERE,
    S,
    T,
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


def dispatch(x: Any = X, plan: Any = PLAN, **options: Any):
    options = {"capacity": W * T, "axis_name": AXIS, **options}
    return trace(lambda x, m: cp.dispatch(x, m, **options), x, plan)


def combine(y: Any = X, plan: Any = PLAN, **options: Any):
    options = {"num_tokens": T, **options}
    return trace(lambda y, m: cp.combine(y, m, axis_name=AXIS, **options), y, plan)


def dispatch_qkv(**options: Any):
    options = {"q_capacity": 9, "kv_capacity": 9, **options}
    return trace(lambda x, m: cp.dispatch_qkv(x, x, m, m, axis_name=AXIS, **options), X, PLAN)


def combine_qkv(**options: Any):
    options = {"q_num_tokens": T, "kv_num_tokens": T, **options}
    return trace(lambda x, m: cp.combine_qkv(x, x, m, m, axis_name=AXIS, **options), X, PLAN)


def gen_seq_lens(num_seqs: Any = 4, total_len: Any = 8):
    return cp.scenarios.gen_seq_lens(KEY, 2, num_seqs, total_len)


def ring_exchange(**options: Any):
    return trace(lambda x: cp.ring_exchange(x, **{"axis_name": AXIS, **options}), X)


def chunk_exchange(**options: Any):
    maps = cp.cycles.chunk_maps([[0, 1, 2, 3]])
    options = {"axis_name": AXIS, **options}
    return trace(lambda x: cp.chunk_exchange(x, *maps, **options), X)


def plan(segment_ids: Any = IDS, positions: Any = None, world_size: Any = W, **options: Any):
    return cp.plan_attention(segment_ids, positions, world_size=world_size, **options)


def gather(x: Any = LHS, w: Any = RHS, **options: Any):
    options = {"method": "ring", **options}
    return trace(lambda x, w: cp.all_gather_matmul(x, w, axis_name=AXIS, **options), x, w)


def scatter(x: Any = LHS, w: Any = RHS, **options: Any):
    options = {"method": "ring", **options}
    return trace(lambda x, w: cp.matmul_reduce_scatter(x, w, axis_name=AXIS, **options), x, w)


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
    ("plan_attention", lambda: plan(IDS * 1.0), "dtype float.*integers"),
    ("plan_attention", lambda: plan(IDS[0]), r"shape \(16,\).*segment_ids\[None\]"),
    ("plan_attention", lambda: plan(-IDS), "is -1 but must be at least 0. Mark padding"),
    ("plan_attention", lambda: plan(world_size=5), "cannot be split.*Pad the columns"),
    ("plan_attention", lambda: plan(positions=IDS[:, :3]), "Pass equal shapes"),
    ("plan_attention", lambda: plan(window=0), "window is 0; it needs to be at least 1"),
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
    # Movement.
    ("dispatch", lambda: dispatch(capacity=None), "got neither of capacity and buffer"),
    ("dispatch", lambda: dispatch(capacity=1.5), "capacity is 1.5; it needs to be a static int"),
    ("dispatch", lambda: dispatch(capacity=-1), "capacity is -1; it needs to be at least 0"),
    ("dispatch", lambda: dispatch(capacity=2**62), "4611686018427387904.*any memory. Pass"),
    ("combine", lambda: combine(num_tokens=2**62), "more than any memory. Pass no more rows"),
    ("dispatch", lambda: dispatch(axis_name=3), "axis_name is 3; it needs the name of one mesh"),
    ("dispatch", lambda: dispatch(mesh=AXIS), "mesh is 'cp'; it needs to be a jax.sharding.Mesh"),
    ("ring_exchange", lambda: ring_exchange(axis_name=3), "axis_name is 3; it needs"),
    ("ring_exchange", lambda: ring_exchange(shift=1.5), "shift is 1.5; it needs to be an integer"),
    ("ring_exchange", lambda: ring_exchange(deadline=-1), "deadline is -1; it needs"),
    ("chunk_exchange", lambda: chunk_exchange(axis_name=3), "axis_name is 3; it needs"),
    ("dispatch", lambda: dispatch(deadline=float("nan")), "deadline is nan; it needs to be"),
    ("dispatch", lambda: dispatch(plan=(PLAN, PLAN)), "metadata is.*needs to be Metadata"),
    ("dispatch", lambda: dispatch(implementation="a"), "implementation is 'a'; there are"),
    ("dispatch", lambda: dispatch(capacity=None, buffer=77), "77.*create_dispatch_buffer"),
    (
        "dispatch",
        lambda: dispatch(plan=plan_of(seq_len=LENGTHS * 1.0)),
        "seq_len has dtype float.*integers",
    ),
    ("dispatch", lambda: dispatch(out=X), "out holds.*but the result is"),
    ("combine", lambda: combine(num_tokens=None), "num_tokens is None; it needs to be a static"),
    ("combine", lambda: combine(X > 0), "cannot sum bool; it sums"),
    ("dispatch_qkv", lambda: dispatch_qkv(q_capacity=None), "got neither of q_capacity"),
    ("dispatch_qkv", lambda: dispatch_qkv(q_out=X), "only one of q_out and kv_out. Pass both"),
    ("combine_qkv", lambda: combine_qkv(kv_num_tokens=-1), "kv_num_tokens is -1; it needs"),
    (
        "create_dispatch_buffer",
        lambda: cp.buffers.create_dispatch_buffer(capacity=-1),
        "capacity is -1; it needs",
    ),
    (
        "create_dispatch_buffer",
        lambda: cp.buffers.create_dispatch_buffer(capacity=2**62),
        "capacity is 4611686018427387904; it needs to be below",
    ),
    (
        "destroy_dispatch_buffer",
        lambda: cp.buffers.destroy_dispatch_buffer(2**40),
        "no buffer 1099511627776.*Pass",
    ),
    # Overlapped products.
    ("all_gather_matmul", lambda: gather(LHS[..., :2]), "2 columns but w has 3 rows.*Transpose"),
    ("all_gather_matmul", lambda: gather(LHS.astype(int)), "int.*needs to be one of"),
    ("all_gather_matmul", lambda: gather(method="no"), "method is 'no'; it needs"),
    ("matmul_reduce_scatter", lambda: scatter(LHS[:, :1]), "not a multiple.*pad"),
    ("all_gather_matmul", lambda: gather(row_counts=(1, 2)), r"row_counts is \(1, 2\); it needs"),
    ("all_gather_matmul", lambda: gather(buffer=77), "no buffer 77. Create it"),
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
