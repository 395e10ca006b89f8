"""What a routing determines: rows, groups, sums and what moves; drops, capacities and its load."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import check as check_layer, on_ranks as layer_on_ranks, split, with_gradients
from expert_cases import LAYER, OPTIONS, D, E, K, T, W, draw, layer_with
from experts_oracle import after_drops, evenly, grouped_rows, num_moved, rows_of_ranks, summed_rows
from hypothesis import given, strategies as st
from on_mesh import AXIS, all_fail, mesh_of, on_ranks
from operations import CHOICES, EXPERTS, ROOM
from pictures import texts
from properties import examples

from jax_cp_dispatch import experts

FEW = 12  # rows; some ranks need more
TIGHT = {**OPTIONS, "capacity": FEW}
HELD = evenly(E, W)


def need(index):
    """The rows that each rank needs."""
    return np.array([len(rows) for rows in rows_of_ranks(index, HELD)])


# ---- Any routing.

MORE = 12  # experts: more than a rank has tokens
ALL = W * T * K
RNG = np.random.default_rng(0)
X = RNG.integers(-8, 9, (W, T, 2)).astype(np.float32)
WEIGHTS = RNG.integers(-4, 5, (W, T, K)).astype(np.float32)


@functools.cache
def program(has_map):
    """Everything that a routing determines; integers, so sums are exact."""

    def run(index, held):
        held = {"physical_to_logical": held} if has_map else {}
        routing = experts.route(index, num_experts=MORE, axis_name=AXIS, capacity=ALL, **held)
        rows, pull_rows = jax.vjp(lambda x: experts.dispatch_tokens(x, routing), *local(X))
        sums = lambda y: experts.combine_tokens(y, *local(WEIGHTS), routing)
        out, pull_sums = jax.vjp(sums, rows)
        pulled = pull_rows(3 * rows)[0], pull_sums(2 * out)[0]
        return rows, out, pulled, (routing.group_sizes, routing.num_recv_tokens, routing.num_rows)

    local = lambda x: (jnp.asarray(x)[jax.lax.axis_index(AXIS)],)
    return on_ranks(run, mesh_of(W))


def check(index, held, *, has_map):
    everywhere = np.broadcast_to(held, (W, *held.shape))
    rows, out, pulled, (sizes, received, num_rows) = program(has_map)(index, everywhere)
    want, want_sizes = grouped_rows(X, index, held, ALL)
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_array_equal(sizes, want_sizes)
    np.testing.assert_array_equal(num_rows[:, 0], want_sizes.sum(1))
    np.testing.assert_array_equal(received[:, 0, :-1], num_moved(index, held).T)
    np.testing.assert_array_equal(received[:, 0, -1], num_moved(index, held).sum(0))
    np.testing.assert_array_equal(out, summed_rows(want, WEIGHTS, index, held))
    # <dispatch(x), 3 rows> = <x, its adjoint>; the sums' adjoint is that of <., 2 out>.
    np.testing.assert_array_equal(pulled[0], 3 * summed_rows(want, None, index, held))
    np.testing.assert_array_equal((pulled[1] * want).sum(), (2 * np.asarray(out) ** 2).sum())


def an_index(most=MORE - 1):
    """Any experts; often few, so that choices repeat, or none."""
    few = st.integers(-1, most).flatmap(lambda e: st.sampled_from([-1, e, e, (e + 1) % MORE]))
    return st.one_of(
        st.lists(st.integers(-1, most), min_size=ALL, max_size=ALL),
        st.lists(few, min_size=ALL, max_size=ALL),
        st.integers(-1, most).map(lambda e: [e] * ALL),
    ).map(lambda x: np.array(x, np.int32).reshape(W, T, K))


@examples(12)
@given(an_index())
def test_experts_spread_evenly(index):
    check(index, evenly(MORE, W), has_map=False)


@examples(12)
@given(an_index(), st.permutations(range(MORE)), st.tuples(*[st.integers(-1, MORE - 1)] * 4))
def test_a_map_with_replicas(index, order, more):
    """Each expert has a place, and some have several; -1 is a place without one."""
    held = np.array([*order, *more], np.int32).reshape(W, -1)
    check(index, held, has_map=True)


# ---- More rows than a rank has room for, and experts without a place, are errors of all ranks.


def dispatch(x, index, **options):
    return experts.dispatch_tokens(x, experts.route(index, **{**TIGHT, **options}))


def combine(y, index):
    return experts.combine_tokens(y, None, experts.route(index, **TIGHT))


def backward(call, given, cotangent):
    """The derivative of a linear call alone: the program does not run the call."""
    return jax.vjp(call, given)[1](cotangent)[0]


CALLS = {
    "dispatch": lambda x, y, index: dispatch(x, index),
    "combine": lambda x, y, index: combine(y, index),
    "derivative of dispatch": lambda x, y, i: backward(lambda x: dispatch(x, i), x, y),
    "derivative of combine": lambda x, y, i: backward(lambda y: combine(y, i), y, x),
}


@pytest.mark.parametrize(
    "call, dtype",
    [*((call, "float32") for call in CALLS if call != "combine"), ("combine", "float16")],
)
def test_an_error_names_rows_or_the_expert(call, dtype):
    """It is that of `route`, whichever call is the first to find it."""
    x, *_, index = draw(0, lowest=0)
    run = on_ranks(CALLS[call], mesh_of(W))
    x, y = x.astype(dtype), np.ones((W, FEW, D), dtype)
    choice = "token 3 choice 1 is" if dtype == "float32" else "chose"  # float16 returns by rank
    most = need(index)
    assert most.max() > FEW
    rank, rows = most.argmax(), most.max()
    message = (
        f"route over axis 'cp': rank {rank} needs {rows} rows for its experts but capacity is "
        f"{FEW}. Pass capacity>={rows}, or overflow='drop'"
    )
    all_fail(run(x, y, index), message)
    for wrong in (E, -2):
        index = np.full_like(index, -1)
        index[2, 3, 1] = wrong
        message = f"route over axis 'cp': rank 2 {choice} expert {wrong}, which has no"
        all_fail(run(x, y, index), message)


@pytest.mark.parametrize("dtype", ["int64", "uint32"])
def test_indices_beyond_32_bits(dtype):
    """None becomes an expert, or none; JAX would cut them to 1, 0 and -1."""
    x, *_, index = draw(lowest=0)
    index = index.astype(dtype)
    with jax.enable_x64(True):
        run = on_ranks(lambda *a: dispatch(*a, capacity=None), mesh_of(W))
        for wrong in (2**32 + 1, -(2**32)) if dtype == "int64" else (2**32 - 1,):
            index[2, 3, 1] = wrong
            seen = np.clip(wrong, -(2**31), 2**31 - 1 - E)
            all_fail(run(x, index), f"rank 2 token 3 choice 1 is expert {seen}, which has no place")
        if dtype == "int64":
            by_xla = lambda *a: dispatch(*a, capacity=None, implementation="xla")
            assert np.isnan(on_ranks(by_xla, mesh_of(W))(x, index)).all()


def test_experts_without_a_place():
    """An expert that the traced map does not hold, or what it holds is none: every choice fails."""
    x, *_, index = draw()
    index[0], index[1] = 0, 5
    with jax.enable_x64(True):
        run = on_ranks(
            lambda x, i, m: dispatch(x, i, physical_to_logical=m, capacity=None), mesh_of(W)
        )
        for wrong in (None, E, -5, 2**32, 2**32 + 5):
            held = np.where(HELD == 5, -1 if wrong is None else wrong, HELD)
            rank, expert = (1, 5) if wrong is None else (0, min(wrong, 2**31 - 1 - E))
            out = run(x, index, np.broadcast_to(held, (W, *held.shape)))
            all_fail(out, f"rank {rank} token 0 choice 0 is expert {expert}, which has no place")


# ---- The lightest choices drop out.


def test_drops_and_their_gradients():
    """The layer without what was dropped, gradients included."""
    arrays, by_ranks = LAYER.arrays("float32", tokens=40), lambda x: x.reshape(W, -1, CHOICES)
    index, weights = (by_ranks(arrays[x]) for x in ("expert_index", "weights"))
    kept = after_drops(index, weights, evenly(EXPERTS, W), ROOM).reshape(-1, CHOICES)
    assert (kept != arrays["expert_index"]).sum() > 9
    *expected, cotangents = LAYER.expected({**arrays, "expert_index": kept})
    run = with_gradients(layer_on_ranks(layer_with(drops=True), mesh_of(W)))
    check_layer(jax.jit(run)(*split(arrays), cotangents), tuple(expected), "float32")


@examples(12)
@given(
    st.lists(st.integers(-1, E - 1), min_size=ALL, max_size=ALL),
    st.lists(st.integers(0, 4), min_size=ALL, max_size=ALL),
)
def test_the_lightest_are_dropped(index, weights):
    """Weights may be equal; then the first choices stay."""
    index = np.array(index, np.int32).reshape(W, T, K)
    weights = np.array(weights, np.float32).reshape(W, T, K)
    row, num_rows, num_dropped, sizes = dropping(index, weights)
    kept = after_drops(index, weights, HELD, FEW)
    np.testing.assert_array_equal(np.asarray(row) >= 0, kept >= 0)
    np.testing.assert_array_equal(num_dropped[:, 0], (kept != index).sum((1, 2)))
    np.testing.assert_array_equal(num_rows[:, 0], need(index))
    np.testing.assert_array_equal(np.asarray(sizes).sum(1), np.minimum(need(index), FEW))


def _dropping(index, weights):
    routing = experts.route(index, overflow="drop", weights=weights, **TIGHT)
    return routing.row, routing.num_rows, routing.num_dropped, routing.group_sizes


dropping = on_ranks(_dropping, mesh_of(W))


@pytest.mark.parametrize("kind", ["float8_e5m2", "float32", "float64"])
def test_any_weights_have_an_order(kind):
    """-0 is 0, NaN is lightest, infinite is heaviest; of thousands, and experts of any load."""
    rng, size, num_experts = np.random.default_rng(0), 4000, 5
    # The last is of no expert. Of the third, 45 % are kept: the lightest of them is a zero.
    share = np.array([0.05, 0.1, 0.22, 0.3, 0.28, 0.05])
    index = rng.choice([*range(num_experts), -1], (size, 1), p=share).astype(np.int32)
    info = jnp.finfo(kind)
    usual = rng.choice([-1, 1], size) * 2.0 ** rng.integers(info.minexp // 2, 3, size)
    special = rng.choice([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], size)
    options = {"num_experts": num_experts, "axis_name": AXIS, "capacity": 9 * size // 20}
    with jax.enable_x64(kind == "float64"):
        weights = np.where(rng.random(size) < 0.3, special, usual).astype(jnp.dtype(kind))
        routing = jax.jit(
            lambda i, w: experts.route(i, weights=w, overflow="drop", mesh=mesh_of(1), **options)
        )(index, weights[:, None])
    kept = np.asarray(routing.row)[:, 0] >= 0
    assert routing.num_dropped[0] == (index >= 0).sum() - kept.sum()
    lost = 0
    for expert in range(num_experts):
        (mine,) = np.nonzero(index[:, 0] == expert)
        values = weights[mine].astype(np.float64)
        order = np.lexsort((-np.nan_to_num(values, nan=0, posinf=np.inf, neginf=-np.inf),
                            np.isnan(values)))  # fmt: skip
        heaviest = mine[order[: kept[mine].sum()]]
        assert sorted(heaviest) == mine[kept[mine]].tolist()
        lost += len(heaviest) < len(mine)
    assert 0 < lost < num_experts


def test_nothing_is_sorted():
    """Compilers for TPUs need minutes for a sort of several arrays."""
    traced = jax.make_jaxpr(dropping)(np.zeros((W, T, K), np.int32), WEIGHTS)
    assert " sort[" not in str(traced)


def test_a_capacity_from_a_sample():
    """It covers the sample, exceeds what is even, and is at most what any routing needs."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(-1, E, (W * 500, K)) for _ in range(30)]
    capacity = experts.fit_capacity(samples, num_experts=E, world_size=W)
    most = [np.bincount(s[s >= 0] // (E // W)).max() for s in samples]
    assert max(most) <= capacity < 1.3 * max(most) and capacity % 128 == 0
    for num_tokens in (W, 500):  # all of expert 0
        alone = np.zeros((num_tokens, K), int)
        assert experts.fit_capacity([alone], num_experts=E, world_size=W) == num_tokens * K


# ---- The load of a routing of all ranks: texts, numbers, times and a picture.


_, OF_CHOICES, INDEX = draw(0, lowest=0)


@functools.partial(jax.jit, static_argnames=("capacity", "overflow"))
def routing_of(index, **options):
    return experts.route(index.reshape(-1, K), mesh=mesh_of(W), **{**OPTIONS, **options})


def test_describe():
    text = routing_of(INDEX).describe()
    rows, sent = need(INDEX), num_moved(INDEX, HELD)
    assert f"{W} ranks of {E // W} experts, {W * T} tokens of {K} choices" in text
    assert f"{ALL} for experts; max/mean {max(rows) / np.mean(rows):.3f}" in text
    assert f"at most {max(rows)} rows needed on rank {np.argmax(rows)}" in text
    moved = sent.sum() - np.trace(sent)
    assert f"{moved} move to another rank ({moved / (W * T):.3f} per token)" in text
    assert "0 choices (0.0%)" in text
    none = routing_of(np.full_like(INDEX, -1)).describe()
    assert "0 for experts; max/mean 1.000" in none and "No tokens move" in none
    drops = {"overflow": "drop", "weights": OF_CHOICES.reshape(-1, K)}
    text = routing_of(INDEX, capacity=FEW, **drops).describe()
    lost = np.maximum(rows - FEW, 0).sum()
    assert f"{lost} choices ({lost / rows.sum():.1%})" in text
    with pytest.raises(TypeError, match=r"Routing.describe: the plan is traced"):
        jax.jit(lambda i: routing_of(i).describe())(INDEX)


def test_imbalance_in_a_program():
    got = jax.jit(lambda i: routing_of(i).imbalance)(INDEX)
    assert got.dtype == np.float32 and got.shape == ()
    np.testing.assert_allclose(got, max(need(INDEX)) / np.mean(need(INDEX)), rtol=1e-6)
    assert routing_of(np.full_like(INDEX, -1)).imbalance == 1
    on_each = on_ranks(lambda i: experts.route(i, **OPTIONS).imbalance, mesh_of(W))
    np.testing.assert_array_equal(on_each(INDEX), np.full(W, got))


def test_each_rank_alone():
    seen = []

    def experts_of_a_rank(sizes, rows):
        jax.debug.callback(lambda x: seen.append(x.tolist()), sizes, ordered=True)
        return rows * sizes.sum()

    profile = experts.load_profile(routing_of(INDEX), experts_of_a_rank, np.ones(3), repeats=2)
    assert profile.work == tuple(need(INDEX)) and len(profile.seconds) == W
    sizes = np.asarray(routing_of(INDEX).group_sizes).reshape(W, -1).tolist()
    assert seen == [sizes[0], *sizes, *sizes]  # the first compiles
    assert str(profile).startswith("experts_of_a_rank: busiest rank")


def test_a_picture_of_the_load(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need it: install the plots extra")
    experts.plot_load(routing_of(INDEX), tmp_path / "load.svg")
    assert {"capacity", "mean", "rank", "rows"} <= set(texts(tmp_path / "load.svg"))
