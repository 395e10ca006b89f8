"""Invalid calls of attention: each is rejected before anything moves."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from comm_gemm_refusals import trace
from on_mesh import AXIS, mesh_of, permuted_mesh
from refusals import HEADS, IDS, NO_PLAN, Q, W, check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch import masks
from jax_cp_dispatch.cost import HARDWARE

pytestmark = pytest.mark.usefixtures("unchecked_types")

RANGES: Any = np.zeros((1, 4), np.int32)
PLACEMENT = cp.place_tokens(segment_ids=IDS, world_size=W)
PACKED = cp.Documents(IDS)
ZIGZAG = cp.Documents(np.ones((1, 12), int)).zigzag(W)
IN_TWO_LEVELS: Any = {"algorithm": cp.Ulysses(cp.Zigzag()), "documents": ZIGZAG}
TWO_BY_TWO = permuted_mesh((2, 2), ("a", AXIS))
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
    return cp.local_attention(q, k, k, start, **{"kv_end": start, **options})


PREFIX, SHORT_PREFIX = (masks.PrefixLM(np.ones((1, n), bool)) for n in (W * 4, W * 4 - 1))
ONE_HEAD: Any = {"q": Q[:, :, :1], "k": Q[:, :, :1]}
ULYSSES, HAMILTON = cp.Ulysses, cp.Hamilton
OTHER_PLAN = cp.plan_attention(lengths=[3, 5], columns=8, world_size=W)


def calls(function, *rows):
    return [(partial(function, **options), says) for options, says in rows]


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "context_parallel_attention": [
        *calls(
            attend,
            ({"algorithm": "no"}, "'no'; it needs to be one of"),
            ({"algorithm": cp.Balanced}, "it needs to be one of.*object with options:"),
            ({"axis_name": "no"}, "'no' but the mesh has axes"),
            ({"axis_name": (AXIS, AXIS)}, r"axis_name is \('cp', 'cp'\); it needs one"),
            ({"batch_axis": "no"}, "batch_axis is 'no' but the mesh has axes"),
            ({"batch_axis": AXIS}, "a mesh axis can shard one dimension only"),
            ({"mesh": TWO_BY_TWO, "batch_axis": "a"}, "B is 1 but batch_axis.*has 2 .*Pass batch_"),
            ({"mesh": TWO_BY_TWO, "head_axis": "a", **ONE_HEAD}, "N is 1 but head_axis .*has 2 "),
            ({"mesh": None}, "no mesh with axis 'cp' was found. Pass mesh=, call it"),
            ({"mesh": AXIS}, "mesh is 'cp'; it needs to be a jax.sharding.Mesh"),
            # Tokens in another order or of other ranks; more: tests/documents.
            ({"algorithm": "zigzag", "documents": PACKED.zigzag(W), "mesh": mesh_of(3)},
             f"documents are in zigzag order of {W} ranks, but mesh axis 'cp' has 3 devices."),
            ({"algorithm": "balanced", "documents": PLANNED, "mesh": mesh_of(3)},
             "T is 16 but mesh axis 'cp' has 3 devices, which must divide it"),
            ({"algorithm": "balanced", "documents": PACKED.zigzag(W)},
             "needs tokens in packed order; got zigzag order of .* ranks. Pass algorithm='zigzag'"),
            ({"algorithm": "balanced", "documents": PLACEMENT.documents},
             "algorithm='balanced' needs tokens in packed order; got placed order"),
            ({"algorithm": "halo", "documents": PLACEMENT.documents},
             "those of a placement, which algorithm='halo' cannot follow"),
            ({"documents": PACKED, "segment_ids": IDS}, "got documents, and segment_ids or"),
            ({"documents": IDS}, "documents is of type ndarray; it needs to be"),
            ({"segment_ids": IDS[:, :3]}, r"is int32\[1, 3\]; .* T = 16 as in q. Pass one int"),
            # Masks and other options.
            ({"algorithm": "halo", "mask": PREFIX},
             "algorithm='halo' needs a mask of numbers.*PrefixLM.*Pass algorithm='balanced'"),
            ({"mask": "no"}, "mask is 'no'; it needs to be"),
            ({"mask": masks.Causal}, "mask is <class.*; it needs to be"),
            ({"mask": np.tri(16, dtype=bool)}, r"an array of shape \[16, 16\].*Pass"),
            ({"mask": SHORT_PREFIX}, r"one number for each token, but the batch has shape \[1, 16"),
            ({"logit_soft_cap": -1.0}, "logit_soft_cap is -1.0, but must be > 0"),
            ({"implementation": "a"}, "implementation is 'a'; it needs"),
            ({"num_comm_sm": 0}, "num_comm_sm is 0; it needs to be at least 1"),
            ({"sink": np.ones(3, np.float32)}, r"sink is float32\[3\].* N = 2 as in q. Pass one"),
            ({"q": ONE_HEAD["q"]}, "1 query heads cannot share 2 KV heads"),
            # Heads shared over ranks.
            ({"algorithm": "ulysses", **ONE_HEAD}, "1 heads but there are 4 ranks.*'zigzag'"),
            ({"algorithm": ULYSSES(cp.Zigzag())},
             "two levels need two mesh axes. Pass axis_name=.outer axis, inner axis."),
            ({"algorithm": ULYSSES(cp.Ring()), **TWO_AXES, **ONE_HEAD},
             "q has 1 heads but there are 2 ranks, which must divide them"),
            ({"algorithm": ULYSSES(cp.Halo()), **TWO_AXES, "mask": PREFIX},
             "algorithm='halo' needs a mask of numbers"),
            ({"algorithm": ULYSSES(cp.Balanced()), **TWO_AXES, "documents": PACKED.zigzag(W)},
             f"got zigzag order of {W} ranks. Pass .* Or pass Ulysses.outer=Zigzag"),
            ({"q": Q[:, :12], "k": Q[:, :12], **TWO_AXES, **IN_TWO_LEVELS},
             "a rank holds 3 tokens in zigzag order of 4 ranks, but two levels need an even"),
        ),
        *calls(partial(attend_with, ULYSSES), ({"outer": "ring"}, "outer is 'ring'; it needs to")),
        *calls(
            partial(attend_with, HAMILTON),
            ({"nodes": 0}, f"nodes is 0 but there are {W} ranks"),
            ({"nodes": 2, "cycles": "direct"}, "got both nodes and cycles"),
            ({"cycles": "scenic"}, "cycles is 'scenic'; it needs to be rows of ranks"),
            ({"cycles": 5}, "cycles is 5; it needs to be rows of"),
            ({"maps": MAPS, "cycles": "direct"}, "got both cycles and maps"),
            ({"maps": MAPS[:1]}, r"it needs to be \(out_chunk, in_chunk\)"),
            ({"maps": TWO_PAIRS}, r"chunk 0 goes from rank 0 along \[0, 1\] and returns"),
        ),
        *calls(
            on_heads,
            ({"algorithm": "ring", "documents": PACKED}, r"segment_ids has shape \(1, 16\)"),
            ({"algorithm": HAMILTON(nodes=3)}, "nodes is 3.*needs to"),
        ),
        (
            lambda: jax.eval_shape(lambda ids: attend(algorithm="auto", segment_ids=ids), IDS),
            "algorithm='auto' reads segment_ids on the host, but they are traced",
        ),
        (
            lambda: cp.context_parallel_attention(
                *(Q, Q, Q[..., :0]), axis_name=AXIS, mesh=mesh_of(W), algorithm="ring"
            ),
            "heads of v have size 0; they need at least one",
        ),
    ],
    "Documents.with_plan": [
        (lambda: PACKED.with_plan(NO_PLAN), "plan is of type ndarray; it needs to be a Plan. Pass")
    ],
    "hamilton_attention_profile": calls(
        profile,
        ({"nodes": 3}, f"nodes is 3 but there are {W}"),
        ({"mesh": mesh_of(3)}, "T is .* but 'cp' has 3 dev"),
    ),
    "balance_profile": calls(
        balance,
        ({"algorithms": ["auto"]}, "got algorithm 'auto'. Name algorithms"),
        ({"algorithms": ["no"]}, "algorithm is 'no'; it needs to be one of"),
        ({"algorithms": [PLACEMENT.plan.slice_of(0)]}, r"\[1\] ranks.*Pass the plan of"),
        ({"algorithms": [OTHER_PLAN]}, rf"\[{W}\] ranks with 1 x 2 rows.*need one of.*with 1 x 4"),
        ({"num_heads": 3}, "3 query heads cannot share 2 KV heads"),
        ({"head_size": 0}, "head_size is 0; it needs to be at least 1"),
        ({"repeats": 0}, "repeats is 0; it needs to be at least 1"),
        ({"dtype": "int32"}, "have dtypes int32.*Cast"),
        ({"mask": SHORT_PREFIX}, r"batch has shape \[1, 16\]."),
        ({"columns": 6}, "the lengths of batch row 0 sum to 8"),
        ({"world_size": 3}, "columns cannot be split over world_size=3"),
    ),
    "choose_algorithm": calls(
        choose,
        ({"lengths": [3]}, r"lengths is \[3\]; it needs.*See document_lengths"),
        ({"lengths": []}, "no batch row. Pass at least one"),
        ({"num_ranks": 0}, "num_ranks is 0; it needs to be at least 1"),
        ({"layout": "no"}, "layout is 'no'; it needs"),
        ({"mask": "no"}, "mask is 'no'; it needs"),
        ({"mask": SHORT_PREFIX}, "PrefixLM.*one number for"),
    ),
    "Workload": calls(choose, ({"num_heads": 3}, "3 query heads cannot share 2 KV heads")),
    "count_pairs": [
        (lambda: cp.cost.count_pairs(0, 8, mask=PREFIX), "one of numbers .*Plans count the pairs")
    ],
    "local_attention": [
        *calls(
            local,
            ({"mask": "full"}, "got ranges of keys, and a mask"),
            ({"start": None, "q_start": RANGES}, "q_start or q_end without kv_start"),
            ({"start": None, "k": Q[:, :3], "mask": "causal"}, "4 queries and 3 keys"),
            ({"kv_end": None}, "kv_end is missing; .* Pass it"),
            ({"start": RANGES[:, :3]}, "T = 4 as in q. Pass one range of keys per query row"),
            ({"logit_soft_cap": 0.0}, "logit_soft_cap is 0.0"),
            ({"block_q": 0}, "block_q is 0"),
            ({"block_heads": 3}, "block_heads is 3, but must be .* divides the 2 KV"),
        ),
    ],
}  # fmt: skip


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)
