"""Invalid calls over the whole public API: each is rejected before anything moves.

A message starts with the operation, and says what it got and what it needs or what to do next.
Errors in values appear at run time: see test_dispatch_errors.py.
"""

import re
from functools import partial
from typing import Any, cast

import jax
import numpy as np
import pytest
from comm_gemm_refusals import trace
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cp
from jax_cp_dispatch.cost import HARDWARE

pytestmark = pytest.mark.usefixtures("unchecked_types")

W, T, S = 4, 6, 2
LENGTHS = np.full((W, S), 3, np.int32)
WHERE = np.arange(W * S, dtype=np.int32).reshape(W, S) % W
PLAN, _ = cp.compute_metadata(LENGTHS, WHERE)
X = np.ones((W, T, 2), np.float32)
IDS = np.ones((1, W * 4), np.int32)
Q = np.ones((1, W * 4, 2, 8), np.float32)
HEADS = np.ones((W, 1, 4, 2, 8), np.float32)
RANGES = np.zeros((1, 4), np.int32)
LHS, RHS = np.ones((W, 2, 3), np.float32), np.ones((W, 3, 5), np.float32)
KEY = jax.random.key(0)
NO_PLAN: Any = WHERE


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


def profile(**options: Any):
    options = {"mesh": mesh_of(W), "axis_name": AXIS, **options}
    return cp.profiling.hamilton_attention_profile(Q, Q, Q, **options)


def choose(lengths: Any = None, **options: Any):
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "itemsize": 4}
    options = {"num_ranks": W, "tokens_per_rank": 8, **sizes, **options}
    return cp.choose_algorithm(lengths, hardware=HARDWARE["cpu"], **options)


def plan(segment_ids: Any = IDS, positions: Any = None, world_size: Any = W, **options: Any):
    return cp.plan_attention(segment_ids, positions, world_size=world_size, **options)


def attend(q: Any = Q, k: Any = Q, **options: Any):
    options = {"axis_name": AXIS, "mesh": mesh_of(W), "algorithm": "ring", **options}
    return jax.eval_shape(lambda q, k: cp.context_parallel_attention(q, k, k, **options), q, k)


def attend_with(algorithm: Any, **its_options: Any):
    return attend(algorithm=algorithm(**its_options))


def on_heads(fn: Any, x: Any = HEADS, **options: Any):
    return trace(lambda x: fn(x, x, x, axis_name=AXIS, **options), x)


def local(q: Any = Q[:, :4], k: Any = Q[:, :4], start: Any = RANGES, **options: Any):
    return cp.local_attention(q, k, k, start, start, **options)


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


# Name, call, and the message after "<operation>: ".
CASES = [
    # Plans.
    ("compute_metadata", lambda: cp.compute_metadata(LENGTHS * 1.0, WHERE), "dtype float.*integer"),
    ("compute_metadata", lambda: cp.compute_metadata(LENGTHS[0], WHERE), r"shape \(2,\).*\[W, S\]"),
    ("compute_metadata", lambda: cp.compute_metadata(LENGTHS, WHERE[:2]), r"shape \(2, 2\), needs"),
    ("compute_metadata", lambda: cp.compute_metadata(LENGTHS, WHERE + W), r"is \d, needs to lie"),
    ("compute_metadata", lambda: cp.compute_metadata(-LENGTHS, WHERE), r"is -3, needs to lie"),
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
        r"shape \(4, 1\), needs",
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
        "world_size is 0, needs at least 1",
    ),
    ("gen_seq_lens", lambda: gen_seq_lens(total_len=10.5), "total_len is 10.5, needs an int"),
    (
        "gen_seq_lens",
        lambda: cp.scenarios.gen_seq_lens(KEY, True, 4, 8),
        "world_size is True, needs an int",
    ),
    ("gen_seq_lens", lambda: gen_seq_lens(num_seqs=2.0), "num_seqs is 2.0, needs an integer"),
    (
        "create_qkv_dispatch",
        lambda: cp.scenarios.create_qkv_dispatch(KEY, 0, 8, 1, 4),
        "world_size is 0, needs at least 1",
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
        r"shape \(1, 6, 2\), needs all 4 ranks",
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
        "grow_dispatch_buffer",
        lambda: cp.buffers.grow_dispatch_buffer(77, capacity=9),
        "no buffer 77.*Pass",
    ),
    # Attention.
    ("context_parallel_attention", lambda: attend(algorithm="no"), "'no'; it needs to be one of"),
    ("context_parallel_attention", lambda: attend(axis_name="no"), "'no' but the mesh has axes"),
    ("context_parallel_attention", lambda: attend(q=Q[0]), r"shapes \(16, 2, 8\).*they need"),
    (
        "context_parallel_attention",
        lambda: attend(segment_ids=IDS[:, :3]),
        r"shape \(1, 3\) but q has.*need to",
    ),
    *(
        ("context_parallel_attention", call, says)
        for call, says in (
            (lambda: attend(mesh=AXIS), "mesh is 'cp'; it needs to be a jax.sharding.Mesh"),
            (lambda: attend(axis_name=(AXIS,)), r"axis_name is \('cp',\); it needs to be the name"),
            (
                lambda: attend(axis_name=3),
                "axis_name is 3; it needs to be the name of one mesh",
            ),
            (lambda: attend(plan=IDS), "plan is of type ndarray; it needs to be an AttentionPlan"),
            (
                lambda: attend_with(cp.Balanced, config=None),
                "config is None; it needs to be a PlanConfig",
            ),
            (
                lambda: attend_with(cp.Auto, hardware="h100"),
                "hardware is 'h100'; it needs to be a jax_cp_dispatch.cost.Hardware",
            ),
            (
                lambda: attend(segment_ids=IDS.tolist()),
                "segment_ids is of type list; it needs",
            ),
            (lambda: attend(causal="no"), "causal is 'no'; it needs to be True or False"),
            (lambda: attend(window=True), "window is True; it needs to be an int, a pair"),
            (lambda: attend(window=(2, 3)), r"window is \(2, 3\) with causal=True.*Pass an int"),
            (lambda: attend(window=3, causal=False), "window is 3 with causal=False.*a pair"),
            (
                lambda: attend(window=(-1, 3), causal=False),
                r"window is \(-1, 3\); it needs two",
            ),
            (
                lambda: attend(deadline="soon"),
                "deadline is 'soon'; it needs to be a positive",
            ),
            (lambda: attend(scale=True), "scale is True, but must be a number"),
            (
                lambda: attend_with(cp.Hamilton, nodes="2"),
                "nodes is '2'; it needs to be an",
            ),
            (
                lambda: attend_with(cp.Hamilton, cycles=5),
                "cycles is 5, needs to be rows of integers",
            ),
            (lambda: attend(layout=None), "layout is None; it needs to be one of 'contiguous'"),
            (lambda: attend(k=Q[:, :, :, :3]), r"\(1, 16, 2, 3\).*needs \[1, S, K, 8\]"),
        )
    ),
    (
        "context_parallel_attention",
        lambda: cp.context_parallel_attention(
            *(Q.tolist(), Q, Q), axis_name=AXIS, mesh=mesh_of(W), algorithm="ring"
        ),
        "q is of type list; it needs to be an array. Pass",
    ),
    (
        "context_parallel_attention",
        lambda: cp.context_parallel_attention(
            *(Q, Q, Q[..., :0]), axis_name=AXIS, mesh=mesh_of(W), algorithm="ring"
        ),
        "heads of v have size 0; they need one feature",
    ),
    (
        "balanced_attention",
        lambda: on_heads(partial(cp.balanced_attention, plan=NO_PLAN)),
        "plan is of type .*needs to be an AttentionPlan",
    ),
    ("hamilton_attention_profile", lambda: profile(mesh=None), "mesh is None; it needs to be"),
    ("hamilton_attention_profile", lambda: profile(axis_name=3), "axis_name is 3; it needs"),
    ("hamilton_attention_profile", lambda: profile(repeats=1.5), "repeats is 1.5; it needs to be"),
    ("choose_algorithm", lambda: choose([3]), r"lengths is \[3\]; it needs.*See document_lengths"),
    ("choose_algorithm", lambda: choose([]), "no batch row. Pass at least one"),
    ("choose_algorithm", lambda: choose(num_ranks=0), "num_ranks is 0; it needs to be at least 1"),
    ("choose_algorithm", lambda: choose(layout="no"), "layout is 'no'; it needs"),
    ("choose_algorithm", lambda: choose(causal="no"), "causal is 'no'; it needs"),
    ("choose_algorithm", lambda: choose(window=(1, 2)), r"window is \(1, 2\) with causal=True"),
    (
        "ring_attention",
        lambda: on_heads(cp.ring_attention, layout="no"),
        "layout is 'no'; it needs",
    ),
    (
        "ring_attention",
        lambda: on_heads(cp.ring_attention, HEADS[:, 0]),
        r"shapes \(4, 2, 8\).*they need",
    ),
    ("zigzag_ring_attention", lambda: on_heads(cp.zigzag_ring_attention, window=0), "window is 0"),
    (
        "hamilton_attention",
        lambda: on_heads(cp.hamilton_attention, nodes=3),
        "nodes is 3.*needs to",
    ),
    ("local_attention", lambda: local(k=Q[:, :4, :, :3]), "4, 2, 3.*needs"),
    ("local_attention", lambda: local(start=RANGES.tolist()), "kv_start is of type list; it needs"),
    (
        "local_attention",
        lambda: local(window=True),
        "window is True; it needs to be an int, a pair",
    ),
    (
        "local_attention",
        lambda: local(window=(1, -2)),
        r"window is \(1, -2\); it needs two",
    ),
    ("local_attention", lambda: local(block_q=True), "block_q is True, but must be an integer"),
    ("local_attention", lambda: local(start=RANGES * 1.0), "dtype float.*Pass integers"),
    ("local_attention", lambda: local(logit_soft_cap=-1.0), "soft_cap is -1.0, but must be > 0"),
    ("zigzag_permutation", lambda: cp.zigzag_permutation(7, 2), "7 tokens.*Pad the sequence"),
    (
        "hamiltonian_cycles",
        lambda: cp.cycles.hamiltonian_cycles(0),
        "n is 0, needs to be at least 1",
    ),
    ("chunk_maps", lambda: cp.cycles.chunk_maps([[0, 1, 1]]), "not a permutation.*must visit each"),
    (
        "two_level_cycles",
        lambda: cp.cycles.two_level_cycles(2, 0),
        "u is 0, needs to be at least 1",
    ),
    # Overlapped products.
    ("all_gather_matmul", lambda: gather(LHS[..., :2]), "2 columns but w has 3 rows.*Transpose"),
    ("all_gather_matmul", lambda: gather(LHS.astype(int)), "int.*needs to be one of"),
    ("all_gather_matmul", lambda: gather(method="no"), "method is 'no'; it needs"),
    ("matmul_reduce_scatter", lambda: scatter(LHS[:, :1]), "do not divide.*pad"),
    ("all_gather_matmul", lambda: gather(row_counts=(1, 2)), r"row_counts is \(1, 2\); it needs"),
    ("all_gather_matmul", lambda: gather(buffer=77), "no buffer 77. Create it"),
    ("create_comm_overlap_buffer", lambda: overlap_buffer("no"), "comm_type is 'no'; it needs"),
    ("create_comm_overlap_buffer", lambda: overlap_buffer(shape=(8,)), r"is \(8,\); it needs"),
    ("create_comm_overlap_buffer", lambda: overlap_buffer(num_splits=0), "is 0; it needs"),
    (
        "destroy_comm_overlap_buffer",
        lambda: cp.buffers.destroy_comm_overlap_buffer(-3),
        "is -3; it needs",
    ),
]


def test_the_list_covers_the_public_api():
    names = {name.split(".")[0] for name, _, _ in CASES}
    public = {name for room in (cp, *vars(cp).values()) for name in getattr(room, "__all__", ())}
    assert len(CASES) >= 40 and names <= public


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    name, call, says = CASES[index]
    buffer = cp.buffers.create_dispatch_buffer(capacity=5)
    before = cp.buffers.list_dispatch_buffers(), cp.buffers.list_comm_overlap_buffers()
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert re.match(rf"{re.escape(name)}: ", message), message
    assert re.search(says, message, flags=re.S), message
    # Nothing was created, counted or overwritten.
    assert (cp.buffers.list_dispatch_buffers(), cp.buffers.list_comm_overlap_buffers()) == before
    cp.buffers.destroy_dispatch_buffer(buffer)
    for array in (X, Q, HEADS, LHS, RHS):
        assert (array == 1).all()
