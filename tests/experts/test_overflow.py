"""More rows than a rank has room for: an error of all ranks, or the lightest choices drop out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import E, K, T, W, check_layer, draw, with_gradients
from experts_oracle import after_drops, evenly, rows_of_ranks
from hypothesis import given, strategies as st
from on_mesh import AXIS, all_fail, mesh_of, on_ranks
from properties import examples

from jax_cp_dispatch import experts
from jax_cp_dispatch.experts.drop import keep_heaviest

FEW = 12  # rows; some ranks need more
OPTIONS = {"num_experts": E, "axis_name": AXIS, "capacity": FEW}
HELD = evenly(E, W)


def dispatch(x, index, **options):
    return experts.dispatch_tokens(x, experts.route(index, **{**OPTIONS, **options}))


def need(index):
    return np.array([len(rows) for rows in rows_of_ranks(index, HELD)])


def combine(y, index, **options):
    return experts.combine_tokens(y, None, experts.route(index, **{**OPTIONS, **options}))


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
    [*((call, "float32") for call in CALLS), ("combine", "float16")],
)
def test_an_error_names_rows_or_the_expert(call, dtype):
    """It is that of `route`, whichever call is the first to find it."""
    x, *_, index = draw(0, lowest=0)
    run = on_ranks(CALLS[call], mesh_of(W))
    x, y = x.astype(dtype), np.ones((W, FEW, *x.shape[2:]), dtype)
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


@pytest.mark.parametrize(
    "dtype, wrong", [("int64", 2**32 + 1), ("int64", -(2**32)), ("uint32", -1), ("uint64", -1)]
)
def test_indices_beyond_32_bits(dtype, wrong):
    """None becomes an expert, or none; JAX would cut them to 1, 0 and -1."""
    x, *_, index = draw(lowest=0)
    index = index.astype(dtype)
    index[2, 3, 1] = np.array(wrong).astype(dtype)
    seen = np.clip(index[2, 3, 1], -(2**31), 2**31 - 1 - E)
    with jax.enable_x64(True):
        run = on_ranks(lambda *a: dispatch(*a, capacity=None), mesh_of(W))
        all_fail(run(x, index), f"rank 2 token 3 choice 1 is expert {seen}, which has no place")
        if dtype == "int64":
            by_xla = lambda *a: dispatch(*a, capacity=None, implementation="xla")
            assert np.isnan(on_ranks(by_xla, mesh_of(W))(x, index)).all()


@pytest.mark.parametrize("wrong", [None, E, -5, 2**32, 2**32 + 5])
def test_experts_without_a_place(wrong):
    """An expert that the traced map does not hold, or what it holds is none: every choice fails."""
    x, *_, index = draw()
    held = np.where(HELD == 5, -1 if wrong is None else wrong, HELD)
    index[0], index[1] = 0, 5
    rank, expert = (1, 5) if wrong is None else (0, min(wrong, 2**31 - 1 - E))
    with jax.enable_x64(True):
        run = on_ranks(
            lambda x, i, m: dispatch(x, i, physical_to_logical=m, capacity=None), mesh_of(W)
        )
        out = run(x, index, np.broadcast_to(held, (W, *held.shape)))
        all_fail(out, f"rank {rank} token 0 choice 0 is expert {expert}, which has no place")


def test_a_rank_that_does_not_come():
    """The exchange of counts has a deadline, as all exchanges."""
    *_, index = draw()

    def run(index):
        counted = lambda i: experts.route(i, deadline=1.0, **OPTIONS).group_sizes
        away = lambda i: i[0, : E // W]
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 3, away, counted, index)

    for shard in on_ranks(run, mesh_of(W), check_vma=False)(index).addressable_shards[:3]:
        message = r"route over axis 'cp': deadline .* wait for missing ranks \[3\]"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            np.asarray(shard.data)


def test_drops_and_their_gradients():
    """The layer without what was dropped, gradients included."""
    x, weights, matrices, g, index = draw(1, lowest=0)
    run = lambda *x: with_gradients(*x, capacity=FEW, overflow="drop")
    kept = after_drops(index, weights, HELD, FEW)
    assert (kept != index).any()
    got = on_ranks(run, mesh_of(W))(x, weights, matrices, g, index)
    check_layer(got, (x, np.where(kept < 0, 0, weights), matrices, g, kept))


@examples(12)
@given(
    st.lists(st.integers(-1, E - 1), min_size=W * T * K, max_size=W * T * K),
    st.lists(st.integers(0, 4), min_size=W * T * K, max_size=W * T * K),
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
    routing = experts.route(index, overflow="drop", weights=weights, **OPTIONS)
    return routing.row, routing.num_rows, routing.num_dropped, routing.group_sizes


dropping = on_ranks(_dropping, mesh_of(W))


KINDS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("kind", KINDS)
def test_any_weights_have_an_order(kind):
    """-0 is 0, NaN is lightest, infinite is heaviest; choices without a place are kept."""
    rng = np.random.default_rng(0)
    size, num_places = 4000, 5
    place = rng.integers(-1, num_places + 1, size).astype(np.int32)
    info = jnp.finfo(kind)
    usual = rng.choice([-1, 1], size) * 2.0 ** rng.integers(info.minexp // 2, 3, size)
    special = rng.choice([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], size)
    with jax.enable_x64(kind == "float64"):
        weights = np.where(rng.random(size) < 0.3, special, usual).astype(jnp.dtype(kind))
        for share in (0, 0.1, 0.5, 0.95, 2):
            quota = (np.bincount(place[place >= 0])[:num_places] * share).astype(np.int32)
            kept = np.asarray(keeping(place, weights, quota))
            assert kept[(place < 0) | (place >= num_places)].all()
            for number, most in enumerate(quota):
                (mine,) = np.nonzero(place == number)
                values = weights[mine].astype(np.float64)
                order = np.lexsort((-np.nan_to_num(values, nan=0, posinf=np.inf, neginf=-np.inf),
                                    np.isnan(values)))  # fmt: skip
                assert sorted(mine[order[:most]]) == mine[kept[mine]].tolist()


keeping = jax.jit(keep_heaviest)


def test_nothing_is_sorted():
    """Compilers for TPUs need minutes for a sort of several arrays."""
    place, weights = np.zeros(4000, np.int32), np.zeros(4000, np.float32)
    traced = jax.make_jaxpr(keep_heaviest)(place, weights, np.ones(5, np.int32))
    assert " sort[" not in str(traced)


def test_a_capacity_from_a_sample():
    """It covers the sample, exceeds what is even, and is at most what any routing needs."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(-1, E, (W * 500, K)) for _ in range(30)]
    capacity = experts.fit_capacity(samples, num_experts=E, world_size=W)
    most = [np.bincount(s[s >= 0] // (E // W)).max() for s in samples]
    assert max(most) <= capacity < 1.3 * max(most) and capacity % 128 == 0
    tiny = experts.fit_capacity([np.zeros((W, K), int)], num_experts=E, world_size=W)
    assert tiny == W * K
