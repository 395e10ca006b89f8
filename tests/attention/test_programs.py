"""What programs of attention hold: exchanges, their bytes and order, and memory.

Values: test_values.py.
"""

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import draw_qkv, with_gradients
from inner import heads_in_parts, pretend_cuda
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxprs import dependences, flattened, inner_jaxprs, runs
from mask_oracle import batch_ranges, range_pairs
from on_mesh import AXIS, mesh_of, permuted_mesh

import jax_cp_dispatch as cpd
from jax_cp_dispatch import Documents, Hamilton, Ring, Ulysses, Zigzag, context_parallel_attention
from jax_cp_dispatch.attention import chunk_exchange, ring_exchange
from jax_cp_dispatch.cost import HARDWARE, Workload
from jax_cp_dispatch.masks import BlockCausal, Causal, Chunked, SlidingWindow

# ---- Rings: exchanges come first, without copies.

CASES: dict[str, Any] = {  # algorithm, ranks, rows of a rank, and chunks
    "ring": (Ring(), 3, 8, 1),
    "zigzag": (Zigzag(), 4, 12, 1),
    "hamilton": (Hamilton(), 5, 16, 4),
    "direct": (Hamilton(), 4, 12, 3),
    "two levels": (Hamilton(nodes=3), 6, 12, 2),
}
EXCHANGES = {"dispatch", "combine"}
ATTENTION = {"attend_blocks", "block_gradients"}


def program(case, *, is_zigzag=True, dtype="float32"):
    """Returns the function of all ranks, and the shapes of q, k, v."""
    algorithm, num_ranks, rows, _ = case
    documents, spec = None, P(None, AXIS)
    if is_zigzag and algorithm != Ring():
        documents = Documents(np.ones((1, num_ranks * rows), np.int32)).zigzag(num_ranks)
    attend = partial(context_parallel_attention, axis_name=AXIS, algorithm=algorithm)
    on_ranks = jax.shard_map(
        lambda documents, *qkv: attend(*qkv, documents=documents),
        mesh=mesh_of(num_ranks), in_specs=spec, out_specs=spec,
    )  # fmt: skip
    shapes = ((1, num_ranks * rows, 2, size) for size in (8, 8, 4))
    return partial(on_ranks, documents), [jax.ShapeDtypeStruct(x, dtype) for x in shapes]


def names(equations):
    return [e.primitive.name for e in equations]


def loops(jaxpr):
    """Yields length and body of all scans over steps, which exchange something."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"].jaxpr
            if EXCHANGES & set(names(flattened(body))):
                yield equation.params["length"], body
        else:
            for inner in inner_jaxprs(equation):
                yield from loops(inner)


@pytest.mark.parametrize("name", CASES)
def test_steps(name):
    """Of each pass, in a loop: exchanges come before attention, and do not depend on it.

    So a compiler may run them at the same time on any platform. Keys move n - 1 times in each pass,
    gradients n times, by an exchange of all chunks. Lowering selects the implementation.
    """
    _, num_ranks, rows, num_chunks = CASES[name]
    attend, operands = program(CASES[name])
    gradient = jax.grad(lambda *x: jnp.sum(attend(*x)), argnums=(0, 1, 2))
    jaxpr = jax.make_jaxpr(gradient)(*operands).jaxpr
    (forward, body), (backward, body_of_gradients) = loops(jaxpr)
    assert (forward, backward) == (num_ranks - 1, num_ranks - 2)

    found = lambda x: [x for x in names(flattened(x)) if x in EXCHANGES | ATTENTION]
    assert found(body) == ["dispatch", "attend_blocks"]
    assert found(body_of_gradients) == ["dispatch", "dispatch", "block_gradients"]
    # Outside: of keys, step 1; of gradients, the last two; of segment ids, before the loop.
    outside = Counter(names(flattened(jaxpr))) - Counter(found(body) + found(body_of_gradients))
    assert outside["dispatch"] == 3 + (name != "ring")

    (exchange,) = (e for e in flattened(body) if e.primitive.name == "dispatch")
    sizes = sum(x.aval.size * x.aval.dtype.itemsize for x in exchange.outvars)
    assert sizes == rows * 2 * (8 + 4) * 4

    lowered = jax.jit(attend).trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    kind = "all_to_all" if 1 < num_chunks == num_ranks - 1 else "collective_permute"
    assert f"stablehlo.{kind}" in lowered and "jax_cp_dispatch.dispatch" not in lowered

    for each in (body, body_of_gradients):
        kinds, needed = [], []
        for equation, needs in dependences(each):
            inner = (e for x in inner_jaxprs(equation) for e in flattened(x))
            of_step = {equation.primitive.name, *names(inner)}
            kinds.append([bool(of_step & EXCHANGES), bool(of_step & ATTENTION)])
            needed.append(needs)
        assert [True, False] in kinds and [False, True] in kinds and [True, True] not in kinds
        for kind, needs in zip(kinds, needed, strict=True):
            other = kind[::-1]
            assert not any(kind) or all(kinds[x] != other for x in needs)


def test_residuals_of_the_backward_pass():
    """q, k, v, out in float32, lse and the key ranges of the rows; nothing per step."""
    num_ranks = 7
    case = Hamilton(), num_ranks, 60, None
    attend, operands = program(case, is_zigzag=False, dtype="bfloat16")
    residuals = jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1], *operands)
    q, _, v = operands
    num_tokens, N = q.shape[1:3]
    needed = num_bytes(operands) + num_tokens * 4 * (N * v.shape[3] + N + 2)
    tables = 16 * 4 * num_ranks**2  # destinations of half the rows in zigzag order
    assert needed <= num_bytes(residuals) <= needed + tables


def num_bytes(tree):
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def test_exchanges_of_two_levels():
    """There and back between the ranks of a node; between nodes those of the ring."""
    axes, x = ("outer", "inner"), jax.ShapeDtypeStruct((1, 64, 4, 8), np.float32)
    where: dict[str, Any] = {"axis_name": axes, "batch_axis": (), "head_axis": ()}
    where["mesh"] = permuted_mesh((4, 2), axes)
    attend = partial(context_parallel_attention, algorithm=Ulysses(Ring()), **where)
    assert runs(jax.make_jaxpr(attend)(x, x, x).jaxpr)["dispatch"] == 2 + 3


# ---- Halo attention: the rows that some query of a rank sees, once, in one exchange a pass.

W, ROWS, N, K, H = 8, 6, 4, 2, 8
SIZES: dict[str, Any] = {"num_heads": N, "num_kv_heads": K, "head_size": H, "itemsize": 4}


def rows_between_ranks(layout, mask):
    """Counts by hand, in one document: the rows of each rank that queries of each other rank see.

    With documents that begin anywhere, any query may be the last or the first of its chunk.
    """
    if isinstance(mask, Chunked):
        mask = SlidingWindow(mask.size)
    allowed = range_pairs(*batch_ranges(mask, np.ones((1, W * ROWS), int), None))[0]
    if isinstance(mask, BlockCausal):
        allowed = np.tri(W * ROWS, k=mask.size - 1, dtype=bool)
    tokens = np.arange(W * ROWS).reshape(W, ROWS)  # of each rank
    if layout == "zigzag":
        tokens = Documents(np.ones((1, W * ROWS), int)).zigzag(W).apply(tokens.reshape(1, -1))
        tokens = tokens.reshape(W, ROWS)
    seen = np.stack([allowed[of_rank].any(0) for of_rank in tokens])  # [receiver, token]
    return np.stack([seen[:, of_rank].sum(1) for of_rank in tokens])  # [sender, receiver]


def exchanges(layout, mask):
    """Returns the rows that a rank holds, in each exchange of a call with its gradients."""
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "batch_axis": (), "head_axis": ()}
    if layout == "zigzag":
        options["documents"] = Documents(np.ones((1, W * ROWS), int)).zigzag(W)
    attend = partial(context_parallel_attention, algorithm="halo", mask=mask, **options)
    shapes = [jax.ShapeDtypeStruct((1, W * ROWS, n, H), jnp.float32) for n in (N, K, K, N)]
    found = []
    for equation in flattened(jax.make_jaxpr(with_gradients(attend))(*shapes).jaxpr):
        arrays = equation.outvars if equation.primitive.name == "dispatch" else equation.invars
        if equation.primitive.name in ("dispatch", "combine"):
            rows = {x.aval.shape for x in arrays if x.aval.shape[1:] == (K, H)}
            found += [(equation.primitive.name, rows)] if rows else []  # not that of segment ids
    return found


REACHES = [
    *(SlidingWindow(1), SlidingWindow(4), SlidingWindow(ROWS + 1), SlidingWindow(5 * ROWS)),
    *(SlidingWindow(8, 2), SlidingWindow(2 * ROWS + 4, ROWS), SlidingWindow(1, 5), Chunked(9)),
]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rows_moved(layout):
    """At most those within reach of each border, whose number the predictions know."""
    borders = 1 if layout == "contiguous" else 2
    row_bytes = 2 * K * H * 4
    for mask in [*REACHES, BlockCausal(4), Causal()]:
        sent = rows_between_ranks(layout, mask)
        received = sent.sum(0) - ROWS
        before, after = mask.reach
        if before is not None and after is not None:
            assert received.max() <= borders * (before + after)
        sizes: dict[str, Any] = SIZES | {"tokens_per_rank": ROWS, "mask": mask}
        algorithm = cpd.Halo(layout)
        most = max(received.max(), (sent.sum(1) - ROWS).max())
        for backward in (False, True):  # sums of gradients return, in float32
            steps = algorithm.step_costs(
                Workload(W, **sizes), hardware=HARDWARE["h100"], backward=backward
            )
            assert sum(x.sent_bytes for x in steps) == received.sum() * row_bytes / W
            assert sum(x.most_inside for x in steps) == most * row_bytes
        text = algorithm.describe(Workload(W, **sizes))
        assert f"{received.sum():,} of them from another rank" in text


@pytest.mark.parametrize(
    "layout, mask",
    [("contiguous", SlidingWindow(ROWS + 1)), ("zigzag", SlidingWindow(2 * ROWS + 4, ROWS))],
)
def test_one_exchange_each_way(layout, mask):
    """No rank can receive more rows than its buffer has, and gradients leave the same buffer."""
    held = int(rows_between_ranks(layout, mask).sum(0).max())
    assert exchanges(layout, mask) == [("dispatch", {(held, K, H)}), ("combine", {(held, K, H)})]


# ---- Placed and balanced attention in two parts of heads, as between GPUs.

LENGTHS = [30, 7, 50, 41]
IDS = np.repeat(np.arange(1, 5), LENGTHS)[None]
PLANNED = Documents(IDS).with_plan(cpd.plan_attention(IDS, world_size=4))


@pytest.mark.parametrize("algorithm", ["placed", "balanced"])
def test_two_parts_give_the_bits_of_one(algorithm):
    """Bit for bit; of 2 and 4 query heads."""
    *arrays, _ = draw_qkv(0, 1, sum(LENGTHS), heads=(6, 3))
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    sink = jnp.linspace(-1, 2, 6)
    if algorithm == "placed":
        documents = cpd.place_tokens([LENGTHS], world_size=4).documents
    else:
        documents = PLANNED

    def run(q, k, v, dout, deadline):
        def attend(*qkv):
            return context_parallel_attention(
                *qkv, mesh=mesh_of(4), axis_name=AXIS, algorithm=algorithm,
                documents=documents, sink=sink, return_lse=True, return_max_logits=True,
                deadline=deadline,
            )  # fmt: skip

        (out, lse, peak), transpose = jax.vjp(attend, q, k, v)
        return out, lse, peak, transpose((dout, jnp.ones_like(lse), jnp.zeros_like(peak)))

    results = []
    for is_cut in (False, True):
        with heads_in_parts(is_cut):
            # With another deadline the function is traced again.
            traced = jax.jit(run, static_argnums=4).trace(*arrays, 60.0 + is_cut)
        num_starts = str(traced.jaxpr).count("exchange_start[")
        assert num_starts == ({"placed": 2, "balanced": 4}[algorithm] if is_cut else 0)
        if algorithm == "balanced":  # its keys are cut by the same function as those of "placed"
            results.append(traced.lower().compile()(*arrays))
    if results:
        jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
    "implementation, kv_heads, is_cut",
    [
        *((name, 2, True) for name in ("cuda_peer", "cuda_ipc", "nvshmem")),
        *((name, 2, False) for name in ("in_process", "shared_memory", "xla")),
        ("cuda_peer", 1, False),
    ],
)
def test_only_implementations_with_two_calls_split(implementation, kv_heads, is_cut):
    """CPU devices and XLA's collectives have one call; one KV head is one part."""
    q, k = (jax.ShapeDtypeStruct((1, sum(LENGTHS), n, H), jnp.float32) for n in (4, kv_heads))
    attend = lambda q, k: context_parallel_attention(
        *(q, k, k), mesh=mesh_of(4), axis_name=AXIS, algorithm="balanced", documents=PLANNED,
        implementation=implementation,
    )  # fmt: skip
    assert ("exchange_start" in str(jax.make_jaxpr(attend)(q, k))) == is_cut


# ---- Options of exchanges reach every custom call, in both passes; lowered for GPUs.

OPTIONS = {"implementation": "cuda_peer", "num_comm_sm": 48, "deadline": 7.0}


@pytest.fixture
def extension(monkeypatch):
    pretend_cuda(
        monkeypatch,
        set_process=lambda process, ordinals: None,
    )


def options_in(fn, *arguments):
    """Returns the options of all exchanges of a program, and how many there are."""
    text = jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @jax_cp_dispatch\.(?:dispatch|combine)\w*\(.*", text)
    read = lambda name, call: re.findall(rf"{name} = (\d+)", call)
    return {tuple(read("num_comm_sm", x) + read("deadline_ms", x)) for x in calls}, len(calls)


@pytest.mark.usefixtures("extension")
@pytest.mark.filterwarnings("ignore:jax_cp_dispatch.*kernel")
@pytest.mark.parametrize("algorithm", ["balanced", "hamilton"])
def test_options_of_attention(algorithm):
    x = np.zeros((1, 32, 4, 8), np.float32)
    documents = Documents(np.repeat([1, 2], 16)[None])
    where = {"mesh": mesh_of(4), "axis_name": AXIS, "documents": documents}
    attend = partial(context_parallel_attention, algorithm=algorithm, **where, **OPTIONS)
    loss = lambda q, k, v: (attend(q, k, v) ** 2).sum()
    found, count = options_in(jax.grad(loss, argnums=(0, 1, 2)), x, x, x)
    assert found == {("48", "7000")} and count >= 2


@pytest.mark.usefixtures("extension")
def test_options_of_exchanges_of_chunks():
    maps = {"out_chunk": [[-1, 0], [0, -1]], "in_chunk": [[-1, 0], [0, -1]]}
    for fn in (ring_exchange, partial(chunk_exchange, **maps)):
        move = partial(fn, axis_name=AXIS, **OPTIONS)
        run = jax.shard_map(move, mesh=mesh_of(2), in_specs=P(AXIS), out_specs=P(AXIS))
        assert options_in(run, np.zeros((2, 3), np.float32)) == ({("48", "7000")}, 1)


# ---- Memory of one rank for attention and its gradients, by the compiler's count.
#
# In units of a rank's rows of q, in float32, with as many KV heads. Documents are at most three
# ranks long. All keys of all ranks would be 2 x (8 - 1) more units, and scores of a rank's rows
# with all keys 512. Arguments and results, four each, are not temporary.

LONG, MANY, SIZE = 4096, 8, 64  # rows of a rank, heads, and their size
LONG_LENGTHS = [3 * LONG, *[LONG // 2] * (2 * (W - 3))]
LONG_IDS = np.repeat(np.arange(1, 1 + len(LONG_LENGTHS)), LONG_LENGTHS).astype(np.int32)[None]
UNIT = LONG * MANY * SIZE * 4

LONG_DOCUMENTS = cpd.Documents(LONG_IDS)
WINDOW = cpd.Documents(LONG_IDS, mask=SlidingWindow(LONG // 2 + 1))
LONG_PLANNED = LONG_DOCUMENTS.with_plan(cpd.plan_attention(LONG_IDS, world_size=W))
PLACED = cpd.place_tokens([LONG_LENGTHS], world_size=W).documents
KEYS = PLACED.plan.kv_capacity / LONG
OF_PLAN = LONG_PLANNED.plan.q_capacity / LONG + LONG_PLANNED.plan.kv_capacity / LONG

# Of the backward pass, which needs the most: of the queries, q, out, dout and dq; keys and values
# that are held, and those that arrive; the gradients of both, that travel and that are computed.
RING = 4 + 2 * 2 + 2 * 2
MOST = {
    "ring": (LONG_DOCUMENTS, RING),
    "halo": (WINDOW, 6 * 1.5 + 2),  # as placed, with half a rank of keys beside its own
    # A rank's own keys in zigzag order, and those of a step once more, in order.
    "hamilton": (LONG_DOCUMENTS, RING + 2 + 2),
    # q, k, v, out of a share of the heads, and the gradients of these.
    "ulysses": (LONG_DOCUMENTS, 8),
    # Six arrays of the rows that came: keys and values, as they came, in blocks and their
    # gradients; likewise of the queries q, out and dout. If queries stay, out and dq.
    "balanced": (LONG_PLANNED, 6 * OF_PLAN),
    "placed": (PLACED, 6 * KEYS + 2),
}
LONGEST_AND_OWN = 3 + 1  # keys of a plan: of the longest document, and a rank's own
# Ids, positions and ranges of all tokens, int32; 16 arrays of them.
OF_TOKENS = 16 * 4 * W * LONG / UNIT


@pytest.mark.parametrize("algorithm", MOST)
def test_memory(algorithm):
    documents, most = MOST[algorithm]
    assert documents.plan is None or documents.plan.kv_capacity <= LONGEST_AND_OWN * LONG
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "batch_axis": (), "head_axis": ()}
    options |= {"algorithm": algorithm, "documents": documents}
    run = with_gradients(partial(context_parallel_attention, **options))
    rows = NamedSharding(mesh_of(W), P(None, AXIS))
    x = jax.ShapeDtypeStruct((1, W * LONG, MANY, SIZE), jnp.float32, sharding=rows)
    compiled = jax.jit(run, out_shardings=rows).lower(x, x, x, x).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.argument_size_in_bytes >= 4 * UNIT  # it counts those of one rank
    assert memory.temp_size_in_bytes / UNIT <= most + OF_TOKENS
