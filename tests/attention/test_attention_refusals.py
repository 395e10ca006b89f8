"""Invalid calls of attention: each is rejected before anything moves."""

from typing import Any, cast

import jax
import numpy as np
import pytest
from comm_gemm_refusals import trace
from on_mesh import AXIS, mesh_of, permuted_mesh
from refusals import HEADS, IDS, NO_PLAN, Q, W, check_names, check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch import masks
from jax_cp_dispatch.cost import HARDWARE

pytestmark = pytest.mark.usefixtures("unchecked_types")

RANGES = np.zeros((1, 4), np.int32)
PLACEMENT = cp.place_tokens(segment_ids=IDS, world_size=W)
PACKED = cp.Documents(IDS)
ZIGZAG = cp.Documents(np.ones((1, 12), int)).zigzag(W)
IN_TWO_LEVELS: Any = {"algorithm": cp.Ulysses(cp.Zigzag()), "documents": ZIGZAG}
TWO_AXES: Any = {"axis_name": ("a", "b"), "mesh": permuted_mesh((2, 2), ("a", "b"))}
PLANNED = PACKED.with_plan(cp.plan_attention(IDS, world_size=W))

MAPS = cp.cycles.chunk_maps(((0, 1, 2, 3), (3, 2, 1, 0)))
# Ranks 0 and 1, and 2 and 3, exchange their chunk: it never reaches the others.
TWO_PAIRS = 2 * ([[-1, 0, -1, -1], [0, -1, -1, -1], [-1, -1, -1, 0], [-1, -1, 0, -1]],)


def profile(**options: Any):
    options = {"mesh": mesh_of(W), "axis_name": AXIS, **options}
    return cp.profiling.hamilton_attention_profile(Q, Q, Q, **options)


def balance(**options: Any):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "columns": 4 * W, "world_size": W}
    return cp.profiling.balance_profile([3, 5], **{**sizes, **options})


def choose(lengths: Any = None, **options: Any):
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "itemsize": 4}
    options = {"num_ranks": W, "tokens_per_rank": 8, **sizes, **options}
    return cp.choose_algorithm(lengths, hardware=HARDWARE["cpu"], **options)


def attend(q: Any = Q, k: Any = Q, **options: Any):
    options = {"axis_name": AXIS, "mesh": mesh_of(W), "algorithm": "ring", **options}
    return jax.eval_shape(lambda q, k: cp.context_parallel_attention(q, k, k, **options), q, k)


def attend_with(algorithm: Any, **its_options: Any):
    return attend(algorithm=algorithm(**its_options))


def on_heads(x: Any = HEADS, **options: Any):
    return trace(lambda x: cp.context_parallel_attention(x, x, x, axis_name=AXIS, **options), x)


def local(q: Any = Q[:, :4], k: Any = Q[:, :4], start: Any = RANGES, **options: Any):
    return cp.local_attention(q, k, k, start, start, **options)


def local_of(segment_ids: Any):
    q: Any = Q[:, :4]
    return cp.local_attention(q, q, q, mask="causal", segment_ids=segment_ids)


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "context_parallel_attention": [
        # Attention.
        (lambda: attend(algorithm="no"), "'no'; it needs to be one of"),
        (lambda: attend(axis_name="no"), "'no' but the mesh has axes"),
        (lambda: attend(batch_axis="no"), "batch_axis is 'no' but the mesh has axes"),
        (lambda: attend(batch_axis=AXIS), "a mesh axis can shard one dimension only"),
        (
            lambda: attend(algorithm="zigzag", documents=PACKED.zigzag(W), mesh=mesh_of(3)),
            f"documents are in zigzag order of {W} ranks, but mesh axis 'cp' has 3 devices.",
        ),
        (
            lambda: attend(algorithm="balanced", documents=PLANNED, mesh=mesh_of(3)),
            "T is 16 but mesh axis 'cp' has 3 devices, which must divide it",
        ),
        (
            lambda: attend(algorithm="balanced", documents=PACKED.zigzag(W)),
            "needs tokens in packed order; got zigzag order of .* ranks. Pass algorithm='zigzag'",
        ),
        (
            lambda: attend(algorithm="halo", mask=masks.PrefixLM(IDS > 0)),
            "algorithm='halo' needs a mask of numbers.*PrefixLM.*Pass algorithm='balanced'",
        ),
        (
            lambda: attend(algorithm="halo", documents=PLACEMENT.documents),
            "those of a placement, which algorithm='halo' cannot follow",
        ),
        (
            lambda: attend(algorithm=cp.Ulysses(cp.Zigzag())),
            "two levels need two mesh axes. Pass axis_name=.outer axis, inner axis.",
        ),
        (
            lambda: attend(
                algorithm=cp.Ulysses(cp.Ring()), **TWO_AXES, q=Q[:, :, :1], k=Q[:, :, :1]
            ),
            "q has 1 heads but there are 2 ranks, which must divide them",
        ),
        (
            lambda: attend(
                algorithm=cp.Ulysses(cp.Halo()), **TWO_AXES, mask=masks.PrefixLM(IDS > 0)
            ),
            "algorithm='halo' needs a mask of numbers",
        ),
        (
            lambda: attend(
                algorithm=cp.Ulysses(cp.Balanced()), **TWO_AXES, documents=PACKED.zigzag(W)
            ),
            f"got zigzag order of {W} ranks. Pass .* Or pass Ulysses.outer=Zigzag",
        ),
        (
            lambda: attend(Q[:, :12], Q[:, :12], **TWO_AXES, **IN_TWO_LEVELS),
            "a rank holds 3 tokens in zigzag order of 4 ranks, but two levels need an even",
        ),
        (lambda: attend_with(cp.Ulysses, outer="ring"), "outer is 'ring'; it needs to be an alg"),
        (lambda: attend(algorithm=cp.Balanced), "it needs to be one of.*object with options:"),
        (
            lambda: jax.eval_shape(lambda ids: attend(algorithm="auto", segment_ids=ids), IDS),
            "algorithm='auto' reads segment_ids on the host, but they are traced",
        ),
        (lambda: attend(q=Q[0]), r"shapes \(16, 2, 8\).*they need"),
        (lambda: attend(k=Q[:, ::2]), "with equal B and T"),
        (lambda: attend(k=Q[:, :, [0, 1, 1]]), "N must be a multiple of K"),
        (lambda: attend(logit_soft_cap=-1.0), "logit_soft_cap is -1.0, but must be > 0"),
        (lambda: attend(implementation="a"), "implementation is 'a'; it needs"),
        (lambda: attend(mask="no"), "mask is 'no'; it needs to be"),
        (lambda: attend(segment_ids=IDS[:, :3]), r"shape \(1, 3\) but q has.*Pass one int"),
        (lambda: attend(mesh=AXIS), "mesh is 'cp'; it needs to be a jax.sharding.Mesh"),
        (lambda: attend(axis_name=(AXIS, AXIS)), r"axis_name is \('cp', 'cp'\); it needs one"),
        (lambda: attend(axis_name=3), "axis_name is 3; it needs the name of one mesh"),
        (lambda: attend(documents=IDS), "documents is of type ndarray; it needs to be"),
        (lambda: attend(documents=PACKED, segment_ids=IDS), "got documents, and segment_ids or"),
        *(
            (lambda options=options: attend_with(cp.Hamilton, **options), says)
            for options, says in (
                ({"nodes": 0}, f"nodes is 0 but there are {W} ranks"),
                ({"nodes": 2, "cycles": "direct"}, "got both nodes and cycles"),
                ({"cycles": "scenic"}, "cycles is 'scenic'; it needs to be rows of ranks"),
                ({"cycles": ((0, 1),)}, r"row 0 of cycles is \[0, 1\], which is not a permutation"),
                ({"cycles": ((0, 1, 2, 3), (1, 2, 3, 0))}, "both go from rank 0 to rank 1"),
                ({"cycles": ()}, f"got 0 cycles for {W} ranks"),
                ({"maps": MAPS, "cycles": "direct"}, "got both cycles and maps"),
                ({"maps": (MAPS[0], MAPS[0])}, "must be each other's transpose"),
                ({"maps": MAPS[:1]}, r"it needs to be \(out_chunk, in_chunk\)"),
                ({"maps": TWO_PAIRS}, r"chunk 0 goes from rank 0 along \[0, 1\] and returns"),
            )
        ),
        (lambda: attend(mesh=mesh_of(1), algorithm=cp.Hamilton(cycles=((0, 1),))), "cycles"),
        (lambda: attend(q=Q[:, :, :1]), "1 query heads cannot share 2 KV heads"),
        (lambda: attend(k=Q.astype("float16")), "float16"),
        (lambda: attend(segment_ids=IDS * 1.0), "segment_ids has dtype float64"),
        (lambda: attend(segment_ids=IDS, positions=IDS[:, ::2]), r"positions has shape \(1, 8\)"),
        (lambda: attend_with(cp.Balanced, config=None), "config is None; it needs to be a"),
        (lambda: attend_with(cp.Auto, hardware="h100"), "hardware is 'h100'; it needs to be a"),
        (lambda: attend(segment_ids=IDS.tolist()), "segment_ids is of type list; it needs"),
        (lambda: attend(mask=True), "mask is True; it needs to be 'causal', 'full', or an"),
        (lambda: attend(mask=cp.masks.Causal), "mask is <class.*; it needs to be"),
        (lambda: attend(mask=np.tri(16, dtype=bool)), r"an array of shape \[16, 16\].*Pass"),
        (lambda: attend(deadline="soon"), "deadline is 'soon'; it needs to be a positive"),
        (lambda: attend(num_comm_sm=0), "num_comm_sm is 0; it needs to be at least 1"),
        (lambda: attend(scale=True), "scale is True, but must be a number"),
        (lambda: attend_with(cp.Hamilton, nodes="2"), "nodes is '2'; it needs to be an"),
        (lambda: attend_with(cp.Hamilton, cycles=5), "cycles is 5; it needs to be rows of"),
        (lambda: attend(k=Q[:, :, :, :3]), r"\(1, 16, 2, 3\).*needs \[1, S, K, 8\]"),
        (
            lambda: cp.context_parallel_attention(
                *(Q.tolist(), Q, Q), axis_name=AXIS, mesh=mesh_of(W), algorithm="ring"
            ),
            "q is of type list; it needs to be an array. Pass",
        ),
        (
            lambda: cp.context_parallel_attention(
                *(Q, Q, Q[..., :0]), axis_name=AXIS, mesh=mesh_of(W), algorithm="ring"
            ),
            "heads of v have size 0; they need at least one",
        ),
        (
            lambda: attend(algorithm="balanced", documents=PLACEMENT.documents),
            "algorithm='balanced' needs tokens in packed order; got placed order",
        ),
        (
            lambda: on_heads(algorithm="placed", documents=cast(Any, PLACEMENT)),
            "documents is of type Placement; it needs to be .*Documents",
        ),
        (lambda: on_heads(algorithm="ring", documents=PACKED), r"segment_ids has shape \(1, 16\)"),
        (lambda: on_heads(HEADS[:, 0], algorithm="ring"), r"shapes \(4, 2, 8\).*they need"),
        (lambda: on_heads(algorithm="zigzag", mask=0), "mask is 0"),
        (lambda: on_heads(algorithm=cp.Hamilton(nodes=3)), "nodes is 3.*needs to"),
    ],
    "Documents.with_plan": [
        (lambda: PACKED.with_plan(NO_PLAN), "plan is of type ndarray; it needs to be a Plan. Pass")
    ],
    "hamilton_attention_profile": [
        (lambda: profile(mesh=None), "mesh is None; it needs to be"),
        (lambda: profile(axis_name=3), "axis_name is 3; it needs"),
        (lambda: profile(repeats=1.5), "repeats is 1.5; it needs to be"),
        (lambda: profile(repeats=0), "repeats is 0"),
        (lambda: profile(axis_name="no"), "axis_name is 'no' but the"),
        (lambda: profile(nodes=3), f"nodes is 3 but there are {W}"),
        (lambda: profile(documents=IDS), "documents is of type ndarray"),
        (lambda: profile(mask="no"), "mask is 'no'; it needs to be"),
        (lambda: profile(colour=1), "got colour; it takes the keywords"),
        (lambda: profile(mesh=mesh_of(3)), "T is .* but 'cp' has 3 dev"),
    ],
    "balance_profile": [
        *(
            (lambda options=options: balance(**options), says)
            for options, says in (
                ({"algorithms": ["auto"]}, "got algorithm 'auto'. Name algorithms"),
                ({"algorithms": ["no"]}, "algorithm is 'no'; it needs to be one of"),
                ({"algorithms": [PLACEMENT.plan.slice_of(0)]}, r"\[1\] ranks.*Pass the plan of"),
                (
                    {"algorithms": [cp.plan_attention(lengths=[3, 5], columns=8, world_size=W)]},
                    rf"\[{W}\] ranks with 1 x 2 rows.*need one of \[{W}\] with 1 x 4",
                ),
                ({"num_heads": 3}, "3 query heads cannot share 2 KV heads"),
                ({"head_size": 0}, "head_size is 0; it needs to be at least 1"),
                ({"repeats": 0}, "repeats is 0; it needs to be at least 1"),
                ({"dtype": "int32"}, "have dtypes int32.*Cast"),
                ({"mask": masks.PrefixLM(np.ones((1, 7), bool))}, r"batch has shape \[1, 16\]."),
                ({"columns": 6}, "the lengths of batch row 0 sum to 8"),
                ({"world_size": 3}, "columns cannot be split over world_size=3"),
            )
        )
    ],
    "choose_algorithm": [
        (lambda: choose([3]), r"lengths is \[3\]; it needs.*See document_lengths"),
        (lambda: choose([]), "no batch row. Pass at least one"),
        (lambda: choose(num_ranks=0), "num_ranks is 0; it needs to be at least 1"),
        (lambda: choose(layout="no"), "layout is 'no'; it needs"),
        (lambda: choose(mask="no"), "mask is 'no'; it needs"),
        (lambda: choose(mask=masks.PrefixLM(np.ones((2, 3), bool))), "PrefixLM.*one number for"),
    ],
    "Workload": [(lambda: choose(num_heads=3), "3 query heads cannot share 2 KV heads")],
    "count_pairs": [
        (
            lambda: cp.cost.count_pairs(0, 8, mask=masks.PrefixLM(np.ones((1, 8), bool))),
            "this needs one of numbers .*plan with plan_attention",
        )
    ],
    "local_attention": [
        (lambda: local(start=RANGES.tolist()), "kv_start is of type list; it needs"),
        (lambda: local(block_q=True), "block_q is True, but must be an integer"),
        (lambda: local(scale="1"), "scale is '1', but must be a number"),
        (lambda: local_of([[1] * 4]), "segment_ids is of type list"),
        (lambda: local_of(IDS[:, :4] * 1.0), "segment_ids has dtype float64"),
        (lambda: local_of(IDS[:, :3]), r"\(1, 3\) but k has B, S = \(1, 4\)"),
    ],
    "merge_partials": [
        (
            lambda: cast(Any, cp.merge_partials)(Q, Q[..., 0], Q, Q[..., 0]),
            r"lse \(1, 16, 2\).* do not match; with out \[B, T, N, Hv\] both lse must be \[B, N,",
        )
    ],
}


def test_the_list_is_of_public_functions():
    check_names(CASES)


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)
