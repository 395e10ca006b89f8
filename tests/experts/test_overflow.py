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


def test_an_error_names_rank_need_and_limit():
    x, *_, index = draw(0, lowest=0)
    most = need(index)
    assert most.max() > FEW
    message = f"rank {most.argmax()} would receive {most.max()} tokens but capacity is {FEW}. Pass"
    all_fail(on_ranks(dispatch, mesh_of(W))(x, index), message)


def test_xla_returns_nan():
    x, *_, index = draw(0, lowest=0)
    run = on_ranks(lambda *a: dispatch(*a, implementation="xla"), mesh_of(W))
    assert np.isnan(run(x, index)).all()


def test_an_index_that_is_no_expert():
    x, *_, index = draw()
    run = on_ranks(lambda *a: dispatch(*a, capacity=None), mesh_of(W))
    by_xla = on_ranks(lambda *a: dispatch(*a, capacity=None, implementation="xla"), mesh_of(W))
    for wrong in (E, -2):
        index[2, 3, 1] = wrong
        all_fail(run(x, index), "rank 2 slot 3 replica 1 has dst_rank")
        assert np.isnan(by_xla(x, index)).all()


def test_an_expert_without_a_place():
    x, *_, index = draw()
    held = np.where(HELD == 5, -1, HELD).astype(np.int32)
    index[0], index[1] = 0, 5
    options = {"physical_to_logical": held, "capacity": None}
    run = on_ranks(lambda x, i: dispatch(x, i, **options), mesh_of(W))
    all_fail(run(x, index), f"rank 1 slot 0 replica 0 has dst_rank {W}")


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
