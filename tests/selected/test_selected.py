"""A learned index: its picks, attention over them and its loss equal their definitions.

The oracle loops over tokens (`selected_oracle.py`). What every operation has to do, such as `vmap`,
the contract asks of the same functions.
"""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import selected_oracle as oracle
from on_mesh import AXIS, all_fail, mesh_of
from packed_batches import pack

import jax_cp_dispatch as cp
from jax_cp_dispatch import profiling, selected
from jax_cp_dispatch.masks import Chunked, Selected, SlidingWindow, Tree

SINK = [0.1, 0.7, -0.3, 0.5]


@dataclasses.dataclass(frozen=True)
class Case:
    """Documents over ranks in an order, and an index with what it picks.

    Attributes:
      algorithm, ranks, order, within: of the call; "local": `local_attention`.
      groups: of the index; picks of one group are `[B, T, k]`.
      shared_keys: one index key for all groups.
      ties: scores of few integers, so most are equal; with `zeros`, all heads are negative.
      options: of `select_keys`.
      of_attention: of attention and the loss.
    """

    algorithm: str = "halo"
    ranks: int = 4
    order: str = "packed"
    within: Any = "causal"
    groups: int = 1
    shared_keys: bool = False
    ties: bool = False
    zeros: bool = False
    weighted: bool = True
    longest: int = 30
    tokens: int = 64
    num_keys: int = 5
    dtype: str = "float32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    of_attention: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def picking(self):
        block = self.options.get("block", 1)
        return {"num_keys": self.num_keys, "block": block, "pool": "max", "local": block > 1,
                **self.options}  # fmt: skip

    def documents(self, seed=0):
        """Returns segment ids, documents in the order of the case, and the ways there and back."""
        rng = np.random.default_rng(seed)
        ids, _ = pack(rng, 2, self.tokens, max_length=self.longest)
        if self.order == "placed":
            placement = cp.place_tokens(segment_ids=ids, world_size=self.ranks, mask=self.within)
            return ids, placement.documents, placement.apply, placement.restore
        documents = cp.Documents(ids)
        if self.order == "zigzag":
            documents = documents.zigzag(self.ranks)
        return ids, documents, documents.apply, documents.restore

    def index(self, shape, heads=3, size=4):
        """Returns q_index `[B, T, G, J, d]`, k_index `[B, T, G, d]` and weights, float32."""
        rng = np.random.default_rng(1)
        draw = lambda *s: rng.normal(size=s).astype(np.float32)
        if self.ties:
            draw = lambda *s: rng.integers(-1, 2, s).astype(np.float32)
        of_keys = (1 if self.shared_keys else self.groups, size)
        q, k = draw(*shape, self.groups, heads, size), draw(*shape, *of_keys)
        if self.zeros:
            q, k = np.abs(q), -np.abs(k)
        weights = draw(*shape, self.groups, heads) if self.weighted else None
        return q, np.broadcast_to(k, (*shape, self.groups, size)), weights

    def given(self, index):
        """Returns the arrays of an index as a caller has them."""
        q, k, weights = index
        if self.groups == 1 or self.shared_keys:
            k = k[:, :, 0]
        if self.groups == 1:
            q, weights = q[:, :, 0], None if weights is None else weights[:, :, 0]
        return q, k, weights

    def where(self, documents):
        return {"axis_name": AXIS, "mesh": mesh_of(self.ranks), "algorithm": self.algorithm,
                "documents": documents}  # fmt: skip

    def select(self, documents, index):
        run = partial(selected.select_keys, mask=self.within, **self.picking)
        return jax.jit(partial(run, **self.where(documents)))(*index)

    def picks(self, index, ids):
        found = oracle.select(*index, segment_ids=ids, mask=self.within, **self.picking)
        return (found[:, :, 0] if self.groups == 1 else found).astype(np.int32)


# ---- Picks.

OF_PICKS = [
    Case("halo", 1, num_keys=100),  # more than any document has
    Case("balanced", 4, groups=2, options={"block": 4}),
    Case("placed", 4, "placed", SlidingWindow(9), ties=True),
    Case("halo", 4, "zigzag", groups=2, ties=True, options={"relu": False}),
    Case("halo", 2, zeros=True, longest=60),
    Case("balanced", 2, weighted=False, options={"block": 4, "pool": "mean", "local": False}),
    Case("placed", 8, "placed", groups=4, shared_keys=True, num_keys=2, options={"block": 8}),
    Case("auto", 2, longest=600, tokens=640, num_keys=3, options={"block": 64, "local": False}),
    Case("halo", 2, within=Chunked(10), longest=600, tokens=640, num_keys=2, ties=True,
         options={"block": 128}),
]  # fmt: skip


@pytest.mark.parametrize("case", OF_PICKS, ids=str)
def test_picks(case):
    ids, documents, apply, restore = case.documents()
    index = case.index(ids.shape)
    want = case.picks(index, ids)
    got = restore(np.asarray(case.select(documents, apply(case.given(index)))))
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.int32


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("relu", [True, False])
def test_blocks_with_nan_are_picked_last(pool, relu):
    """Wherever NaN is among the keys of a block, and also where products are cut at 0."""
    for at in range(4):
        k = np.repeat(np.arange(5, 0, -1, dtype=np.float32), 4)[None, :, None]
        k[0, at] = k[0, 8 + at] = np.nan
        options = {"relu": relu, "block": 4, "pool": pool, "local": False}
        case = Case(ranks=1, num_keys=3, options=options)
        index = np.ones((1, 20, 1, 1), np.float32), k, None
        got = np.asarray(case.select(cp.Documents(np.ones((1, 20), np.int32)), index))
        np.testing.assert_array_equal(got[0, [11, 19]], [[0, 1, 2], [1, 3, 4]])


def test_nan_is_picked_last():
    ids = np.ones((1, 8), np.int32)
    k = np.ones((1, 8, 1), np.float32)
    k[0, [2, 5], 0], k[0, 3, 0] = np.nan, -np.inf
    case = Case(ranks=1, num_keys=4, options={"relu": False})
    got = case.select(cp.Documents(ids), (np.ones((1, 8, 1, 1), np.float32), k, None))
    np.testing.assert_array_equal(
        np.asarray(got)[0, 3:6], [[0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 3, 4]]
    )


# ---- Attention over picks.


def drawn(case, shape, num_heads=(4, 2), size=6, value_size=5):
    rng = np.random.default_rng(3)
    draw = lambda *s: rng.normal(size=(*shape, *s)).astype(np.float32)
    N, K = num_heads
    arrays = draw(N, size), draw(K, size), draw(K, value_size)
    cast = lambda x: x.astype(jnp.dtype(case.dtype))
    return [cast(x) for x in arrays]


def attend(case, documents, mask, sink, *arrays):
    """Returns out and lse `[B, T, N]`."""
    softmax = {"sink": sink, **case.of_attention}
    if case.algorithm == "local":
        out, lse = cp.local_attention(*arrays, mask=mask, documents=documents, **softmax)
        return out, jnp.swapaxes(lse, 1, 2)
    return cp.context_parallel_attention(
        *arrays, mask=mask, return_lse=True, **case.where(documents), **softmax
    )


def with_gradients(function, arrays, cotangents):
    def both(arrays, cotangents):
        results, pull = jax.vjp(function, *arrays)
        return results, pull(cotangents)

    return jax.jit(both)(arrays, cotangents)


def close(got, want, dtype="float32"):
    """Within some units of rounding of the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert (np.isfinite(got) == np.isfinite(want)).all()
    got, want = (np.where(np.isfinite(want), x, 0) for x in (got, want))
    rounding = {"float32": 2e-5, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=rounding * max(1, np.abs(want).max()))


SOFTMAX: Any = {"logit_soft_cap": 2.0, "scale": 0.6}
OF_ATTENTION = [
    Case("local", 1, groups=2, of_attention=SOFTMAX),
    Case("local", 1, within=SlidingWindow(9), groups=4, options={"block": 4}, num_keys=2),
    Case("balanced", 4, dtype="bfloat16"),
    Case("halo", 4, groups=2, options={"block": 4}, num_keys=2, within=Chunked(13)),
    Case("halo", 4, "zigzag", groups=4, of_attention=SOFTMAX),
    Case("placed", 4, "placed", groups=2, options={"block": 16, "local": False}, num_keys=1),
    # Blocks of the union of a tile's queries, more than a step reads at once.
    Case("local", 1, longest=300, tokens=320, num_keys=4, options={"block": 16},
         of_attention=SOFTMAX),
    Case("placed", 4, "placed", SlidingWindow(9), of_attention={"value_size": 4}),
    Case("balanced", 4, within="full", of_attention={"value_size": 4, "implementation": "xla"},
         options={"block": 16}, num_keys=1),
]  # fmt: skip


@pytest.mark.parametrize("case", OF_ATTENTION, ids=str)
def test_attention(case):
    """Sinks in cases of several groups, absorbed values with `value_size`."""
    ids, documents, apply, restore = case.documents()
    picks = case.picks(case.index(ids.shape), ids)
    sink = jnp.asarray(SINK) if case.groups > 1 else None
    arrays = drawn(case, ids.shape, (4, 2))
    value_size = case.of_attention.get("value_size")
    if value_size:
        arrays = [arrays[0], arrays[1][:, :, :1], arrays[1][:, :, :1, :value_size]]
    of_groups = picks if case.groups > 1 else picks[:, :, None]
    block = case.picking["block"]
    seen = oracle.pairs(of_groups, ids, case.within, block)
    softmax = {"scale": case.of_attention.get("scale"), "sink": sink,
               "cap": case.of_attention.get("logit_soft_cap")}  # fmt: skip
    out, lse, pull = oracle.attention(arrays, seen, **softmax)
    rng = np.random.default_rng(4)
    dout = rng.normal(size=out.shape).astype(arrays[0].dtype)
    dlse = np.where(lse > -np.inf, rng.normal(size=lse.shape), 0).astype(np.float32)
    wanted = list(pull(dout, dlse))
    if value_size:
        wanted[1][..., :value_size] += wanted.pop(2)
        arrays.pop()
    mask = Selected(picks, case.within, block=block)
    mask, dout, dlse, arrays = apply((mask, dout, dlse, arrays))
    function = partial(attend, case, documents, mask)
    (got, got_lse), gradients = with_gradients(function, [sink, *arrays], (dout, dlse))
    dsink, *gradients = gradients
    results = restore(jax.tree.map(np.asarray, [got, got_lse, *gradients]))
    for x, want in zip(results, (out, lse, *wanted), strict=False):
        close(x, want, case.dtype)
    if sink is not None:
        close(dsink, wanted[-1])


def test_latents_are_expanded_where_they_arrive():
    """And weights have gradients; with as many picks as keys, attention is that without picks."""
    case = Case("placed", 4, "placed", num_keys=40)
    ids, documents, apply, _ = case.documents()
    picks = case.picks(case.index(ids.shape), ids)
    rng = np.random.default_rng(5)
    draw = lambda *s: rng.normal(size=s).astype(np.float32)
    q, latents = apply((draw(*ids.shape, 4, 6), draw(*ids.shape, 3)))
    weights = draw(3, 2, 11)

    def attended(mask, q, latents, weights):
        split = lambda w, rows: tuple(jnp.split(jnp.einsum("rl,lkh->rkh", rows, w), [6], axis=2))
        return cp.context_parallel_attention(
            q, latents, expand=split, weights=weights, mask=mask, sink=jnp.asarray(SINK),
            return_lse=True, return_max_logits=True, **case.where(documents),
        )[:2]  # fmt: skip

    cotangents = apply((draw(*ids.shape, 4, 5), np.where(ids[..., None] > 0, draw(4), 0)))
    arrays = q, latents, weights
    picked, whole = (
        jax.tree.leaves(with_gradients(partial(attended, mask), arrays, cotangents))
        for mask in (apply(Selected(picks)), None)
    )
    for x, y in zip(picked, whole, strict=True):
        close(x, y)


def test_recorded_picks_replay():
    case = Case("placed", 4, "placed")
    ids, documents, apply, restore = case.documents()
    picks = case.select(documents, apply(case.given(case.index(ids.shape))))
    arrays = apply(drawn(case, ids.shape))
    recorded = apply(Selected(restore(np.asarray(picks))))
    once, again = (
        jax.jit(partial(attend, case, documents))(mask, None, *arrays)[0]
        for mask in (Selected(picks, order=documents.order), recorded)
    )
    np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize("block", [1, 16])
def test_gradients_of_keys_are_sums_in_a_fixed_order(block):
    """A scatter adds to distinct rows: on GPUs it has no order. So there is no other one."""
    shape = lambda *s: jax.ShapeDtypeStruct((1, 64, *s), jnp.float32)

    where = {"axis_name": AXIS, "mesh": mesh_of(1), "algorithm": "halo"}

    def loss(q, k, v, k_index, picks):
        mask = Selected(picks, block=block)
        out = cp.local_attention(q, k, v, mask=mask)[0]
        return out.sum() + selected.index_loss(q, k_index, None, q, k, mask=mask, **where).sum()

    picks = jax.ShapeDtypeStruct((1, 64, 3), jnp.int32)
    arrays = shape(4, 6), shape(2, 6), shape(2, 5), shape(6)
    lowered = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*arrays, picks).as_text()
    scatter = r'"stablehlo.scatter"\(.*?unique_indices = (true|false).*?-> tensor<(.*?)>'
    sums = re.findall(scatter, lowered, re.DOTALL)
    of_rows = [is_unique for is_unique, of in sums if of.endswith("f32")]
    assert of_rows == ["true"] * (3 if block == 1 else 1)  # of k and v, and of the index


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_64_bit_types(dtype):
    """Traced, of blocks and the loss over all keys: where rows are cut, indices have one dtype."""
    where = {"axis_name": AXIS, "mesh": mesh_of(1), "algorithm": "halo"}

    def loss(q, k, q_index, k_index, picks):
        out = cp.local_attention(q, k, k, mask=Selected(picks, block=16))[0]
        return out.sum() + selected.index_loss(q_index, k_index, None, q, k, **where).sum()

    shape = lambda *s, dtype=dtype: jax.ShapeDtypeStruct((1, 64, *s), jnp.dtype(dtype))
    with jax.enable_x64(True):
        arrays = shape(4, 6), shape(2, 6), shape(3, 6), shape(6)
        found = jax.eval_shape(jax.grad(loss, (0, 1, 2, 3)), *arrays, shape(3, dtype="int32"))
    assert found == arrays


# ---- Memory.


def test_memory_grows_with_the_tokens_alone():
    """Of select_keys, and of both passes of attention and of the loss, on one rank."""

    def temporary(num_tokens):
        shape = lambda *s: jax.ShapeDtypeStruct((1, num_tokens, *s), jnp.float32)
        where = {"axis_name": AXIS, "mesh": mesh_of(1), "algorithm": "halo"}
        index, attended = (shape(2, 4), shape(4), shape(2)), (shape(2, 4), shape(1, 4))

        def loss(index, attended, picks):
            options = {"mask": Selected(picks), **where}
            out = cp.context_parallel_attention(*attended, value_size=4, **options)
            sparse = selected.index_loss(*index, *attended, **options)
            return out.sum() + sparse.sum() + selected.index_loss(*index, *attended, **where).sum()

        def all_of_it(index, attended):
            picks = selected.select_keys(*index, num_keys=32, **where)
            return jax.grad(loss, (0, 1))(index, attended, picks)

        memory: Any = jax.jit(all_of_it).lower(index, attended).compile().memory_analysis()
        return memory.temp_size_in_bytes

    few, many = temporary(2048), temporary(8192)
    assert many < 4.5 * few and many < 8192 * 8192  # not one byte for each pair


# ---- The loss of the index.

OF_LOSS = [
    Case("halo", 1, of_attention=SOFTMAX),
    Case("balanced", 4, groups=2, options={"block": 4}, num_keys=2),
    Case("placed", 4, "placed", groups=4, shared_keys=True, options={"relu": False}),
    Case("balanced", 4, weighted=False, num_keys=0),
    Case("halo", 4, "zigzag", SlidingWindow(9), groups=2, num_keys=0),
]


@pytest.mark.parametrize("case", OF_LOSS, ids=str)
def test_index_loss(case):
    """Over all visible keys if there are no picks; the oracle has the slope softmax(I) - p."""
    ids, documents, apply, restore = case.documents()
    index, mask = case.index(ids.shape), case.within
    all_keys = np.broadcast_to(np.arange(ids.shape[1]), (*ids.shape, 1, ids.shape[1]))
    seen, block = oracle.pairs(all_keys, ids, case.within, 1), case.picking["block"]
    if case.num_keys:
        picks = case.picks(index, ids)
        mask = apply(Selected(picks, case.within, block=block))
        seen = oracle.pairs(
            picks if case.groups > 1 else picks[:, :, None], ids, case.within, block
        )
    q, k, _ = drawn(case, ids.shape)
    # Sinks may take all of the weights: exp(logit - sink) is 0 in float32.
    sink = np.array(SINK) + 110 * (case.order == "zigzag") if case.groups > 1 else None
    softmax: Any = {"scale": case.of_attention.get("scale"), "sink": sink,
                    "cap": case.of_attention.get("logit_soft_cap")}  # fmt: skip
    relu = case.options.get("relu", True)
    loss, pull = oracle.index_loss(index, (q, k), ids, seen, relu=relu, **softmax)
    dloss = np.random.default_rng(6).normal(size=ids.shape).astype(np.float32)
    dq, dk, dweights = pull(dloss)
    wanted = dq, dk.sum(2) if case.groups == 1 or case.shared_keys else dk, dweights
    q, k, dloss, given = apply((q, k, dloss, case.given(index)))

    def run(given, attended):
        options = {"mask": mask, "relu": relu, **case.where(documents), **case.of_attention}
        return selected.index_loss(*given, *attended[:2], sink=attended[2], **options)

    got, (of_index, of_attention) = with_gradients(run, (given, (q, k, sink)), dloss)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(of_attention))
    close(restore(np.asarray(got)), loss)
    of_index = restore(jax.tree.map(np.asarray, of_index))
    for x, want in zip(of_index, wanted, strict=True):
        if want is not None:
            close(x.reshape(want.shape), want)


# ---- What is refused.


def wrong_picks():
    """Picks `[1, 16, 3]` of a document of 10 tokens and one of 6 that are not picks of these."""
    own = np.concatenate([np.arange(10), np.arange(6)])
    right = np.full((1, 16, 3), -1, np.int32)
    right[0, :, 0] = own
    changed = {
        "the future": (4, 5),
        "beyond the document": (15, 6),
        "not ascending": (9, (3, 2, 9)),
        "a gap": (9, (-1, 2, 9)),
        "below -1": (9, (3, -2, -1)),
    }
    for name, (row, picks) in changed.items():
        wrong = right.copy()
        wrong[0, row, : np.size(picks)] = picks
        yield name, wrong
    yield "another batch", np.roll(right, 3, axis=1)


@pytest.mark.parametrize("order", ["packed", "placed"])
def test_wrong_picks_fail_on_all_ranks(order):
    ids = np.repeat([[1, 2]], [10, 6], axis=1)
    q, k, v = drawn(Case(), (1, 16))
    algorithm = "placed" if order == "placed" else "balanced"
    documents, apply = cp.Documents(ids), lambda x: x
    if order == "placed":
        placement = cp.place_tokens(segment_ids=ids, world_size=2)
        documents, apply = placement.documents, placement.apply
    run = jax.jit(
        lambda mask, *arrays, implementation=None: cp.context_parallel_attention(
            *arrays, mask=mask, documents=documents, algorithm=algorithm, axis_name=AXIS,
            mesh=mesh_of(2), implementation=implementation,
        ), static_argnames="implementation",
    )  # fmt: skip
    cases = [picks for _, picks in wrong_picks()]
    for wrong in cases:
        all_fail(run(*apply((Selected(wrong), q, k, v))), "picks of Selected .* block= and order=")
    wrong = cases[-1]
    out = run(*apply((Selected(wrong), q, k, v)), implementation="xla")
    assert np.isnan(out).all()
    index = apply(Case().given(Case().index((1, 16))))
    loss = partial(
        selected.index_loss, axis_name=AXIS, mesh=mesh_of(2), algorithm=algorithm,
        documents=documents,
    )  # fmt: skip
    all_fail(jax.jit(loss)(*index, *apply((q, k)), mask=apply(Selected(wrong))), "mask")
    local = cp.local_attention(*map(jnp.asarray, (q, k, v)), mask=Selected(wrong), segment_ids=ids)[
        0
    ]
    assert np.isnan(local).all()


ZEROS = np.zeros((1, 16, 4, 6), np.float32)
PICKS = Selected(np.zeros((1, 16, 2), np.int32))
WRONG_GROUPS = Selected(np.zeros((1, 16, 3, 2), np.int32))
WRONG_ORDER: Any = "packed"
ONES = np.ones((1, 16), np.int32)
ZIGZAG = cp.Documents(ONES).zigzag(2)
TREE = Tree(0 * ONES, -ONES[:, :1])
INDEX = np.zeros((1, 16, 3, 2, 4), np.float32), np.zeros((1, 16, 4), np.float32), None


def attended(v=None, algorithm="halo", **options):
    where = {"axis_name": AXIS, "mesh": mesh_of(2), "algorithm": algorithm}
    return cp.context_parallel_attention(ZEROS, ZEROS, v, **where, **options)


def selects(algorithm="halo", num_keys=2, **options):
    where = {"axis_name": AXIS, "mesh": mesh_of(2), "algorithm": algorithm}
    return selected.select_keys(ZEROS, ZEROS[:, :, 0], num_keys=num_keys, **where, **options)


REFUSED = [
    (lambda: attended(ZEROS, "ring", mask=PICKS), "'ring' .* Pass algorithm='balanced'"),
    (lambda: attended(ZEROS, "ulysses", mask=PICKS), "algorithm='ulysses'"),
    (lambda: attended(ZEROS, mask=PICKS, documents=ZIGZAG), "arrays of mask=.* packed order"),
    (lambda: attended(ZEROS, mask=WRONG_GROUPS), "G one of 1, 4 and 4"),
    (lambda: attended(ZEROS, value_size=4), "value_size with v"),
    (lambda: attended(value_size=7), "value_size is 7"),
    (lambda: attended(value_size=4, weights=ZEROS), "weights or weight_specs without expand"),
    (  # the default of the adapter of MaxText
        lambda: selects("zigzag"),
        "select_keys: .*algorithm='zigzag' .* Pass algorithm='balanced' or 'halo'",
    ),
    (lambda: selects("ulysses"), "select_keys: .* Pass algorithm='balanced' or 'halo'"),
    (lambda: selects("balanced", documents=ZIGZAG), "select_keys: .* Pass algorithm='halo'"),
    (lambda: selects(mask=TREE), "mask is Tree"),
    (lambda: selects(num_keys=0), "num_keys"),
    (lambda: selects(pool="sum"), "pool is 'sum'"),
    (lambda: selects(local=1), "local is 1"),
    (lambda: selects(relu=None), "select_keys: relu is None"),
    (lambda: Selected(np.zeros((1, 16, 2))), "Selected: picks"),
    (lambda: Selected(PICKS.picks[:, :, :0]), "Selected: .* without picks"),
    (lambda: Selected(0 * PICKS.picks, SlidingWindow(4, first=2)), "Selected: mask is"),
    (lambda: Selected(PICKS.picks, order=WRONG_ORDER), "Selected: order is .packed."),
    (lambda: cp.Documents(ONES, mask=PICKS), "Documents: .* only attention and index_loss"),
    (lambda: selects(mask=PICKS), "select_keys: .* only attention and index_loss"),
    (lambda: Selected(PICKS.picks, PICKS), "Selected: .* only attention and index_loss"),
    (
        lambda: profiling.balance_profile(
            [16], world_size=2, num_heads=4, num_kv_heads=4, head_size=8, mask=PICKS
        ),
        "balance_profile: .* only attention and index_loss",
    ),
    (
        lambda: profiling.hamilton_attention_profile(
            ZEROS, ZEROS, ZEROS, axis_name=AXIS, mesh=mesh_of(2), mask=PICKS
        ),
        "hamilton_attention_profile: .* only attention and index_loss",
    ),
    (
        lambda: cp.choose_algorithm(
            [[16]],
            num_ranks=2,
            tokens_per_rank=8,
            num_heads=4,
            num_kv_heads=4,
            head_size=8,
            itemsize=4,
            mask=PICKS,
        ),
        "choose_algorithm: .* only attention and index_loss",
    ),
    (
        lambda: selected.index_loss(
            *INDEX, ZEROS, ZEROS, axis_name=AXIS, algorithm="halo", mesh=mesh_of(2)
        ),
        "3 groups",
    ),
]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("call, says", REFUSED)
def test_refused(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()


# ---- Bits; last, as what follows in this file would be compiled with all optimizations.


@pytest.mark.usefixtures("full_optimization")
@pytest.mark.parametrize("block", [1, 4])
def test_picks_are_the_same_bits_everywhere(block):
    """Also the scores: equal keys have equal scores in all tiles, so the first of them is picked.

    Long documents make several chunks and tiles; half the keys are copies of earlier ones. Blocks
    are those whose mean counts, which is a sum of rows at other places on each rank.
    """
    options = {"block": block, "pool": "mean" if block > 1 else "max"}
    case = Case("halo", 1, longest=900, tokens=1000, num_keys=40, options=options)
    elsewhere = [("placed", 8, "placed"), ("balanced", 2, "packed"), ("halo", 4, "zigzag")]
    runs = [case]
    for algorithm, ranks, order in elsewhere[: 1 if block > 1 else None]:
        runs.append(dataclasses.replace(case, algorithm=algorithm, ranks=ranks, order=order))
    ids, *_ = case.documents()
    q, k, weights = case.index(ids.shape, heads=5, size=24)
    k = k.copy()
    k[:, 500:] = k[:, np.random.default_rng(2).integers(0, 500, 500)]
    results = []
    for one in runs:
        _, documents, apply, restore = one.documents()
        found = one.select(documents, apply(one.given((q, k, weights))))
        results.append(restore(np.asarray(found)))
    for found in results[1:]:
        np.testing.assert_array_equal(found, results[0])
    for b, first, length in oracle.documents(ids) if block == 1 else ():
        rows = k[b, first : first + length, 0]
        earlier = {}
        for p, row in enumerate(map(bytes, rows)):
            earlier.setdefault(row, []).append(p)
        for t in range(0, length, 97):
            picked = set(results[0][b, first + t].tolist())
            for copies in earlier.values():
                chosen = [p in picked for p in copies]
                assert chosen == sorted(chosen, reverse=True)
