"""Texts and pictures of the load of a routing of all ranks."""

from functools import partial

import jax
import numpy as np
import pytest
from expert_cases import OPTIONS, E, K, T, W, draw
from experts_oracle import evenly, num_moved, rows_of_ranks
from on_mesh import mesh_of, on_ranks
from pictures import texts

from jax_cp_dispatch import experts


@partial(jax.jit, static_argnames=("capacity", "overflow"))
def routing_of(index, **options):
    index = index.reshape(-1, K)
    return experts.route(index, mesh=mesh_of(W), **{**OPTIONS, **options})


def test_describe():
    *_, index = draw(0, lowest=0)
    text = routing_of(index).describe()
    rows = [len(x) for x in rows_of_ranks(index, evenly(E, W))]
    sent = num_moved(index, evenly(E, W))
    assert f"{W} ranks of {E // W} experts, {W * T} tokens of {K} choices" in text
    assert f"{W * T * K} for experts; max/mean {max(rows) / np.mean(rows):.3f}" in text
    assert f"at most {max(rows)} rows needed on rank {np.argmax(rows)}" in text
    moved = sent.sum() - np.trace(sent)
    assert f"{moved} move to another rank ({moved / (W * T):.3f} per token)" in text
    assert "0 choices (0.0%)" in text
    none = routing_of(np.full_like(index, -1)).describe()
    assert "0 for experts; max/mean 1.000" in none and "No tokens move" in none


def test_dropped_choices_are_described():
    _, weights, *_, index = draw(1, lowest=0)
    weights = weights.reshape(-1, K)
    routing = routing_of(index, capacity=12, overflow="drop", weights=weights)
    rows = np.array([len(x) for x in rows_of_ranks(index, evenly(E, W))])
    lost = np.maximum(rows - 12, 0).sum()
    assert f"{lost} choices ({lost / rows.sum():.1%})" in routing.describe()


def test_imbalance_in_a_program():
    *_, index = draw(0, lowest=0)
    rows = [len(x) for x in rows_of_ranks(index, evenly(E, W))]
    got = jax.jit(lambda i: routing_of(i).imbalance)(index)
    assert got.dtype == np.float32 and got.shape == ()
    np.testing.assert_allclose(got, max(rows) / np.mean(rows), rtol=1e-6)
    assert routing_of(np.full_like(index, -1)).imbalance == 1
    on_each = on_ranks(lambda i: experts.route(i, **OPTIONS).imbalance, mesh_of(W))
    np.testing.assert_array_equal(on_each(index), np.full(W, got))


def test_each_rank_alone():
    *_, index = draw(0, lowest=0)
    seen = []

    def experts_of_a_rank(sizes, rows):
        jax.debug.callback(lambda x: seen.append(x.tolist()), sizes, ordered=True)
        return rows * sizes.sum()

    profile = experts.load_profile(routing_of(index), experts_of_a_rank, np.ones(3), repeats=2)
    rows = rows_of_ranks(index, evenly(E, W))
    assert profile.work == tuple(map(len, rows)) and len(profile.seconds) == W
    sizes = np.asarray(routing_of(index).group_sizes).reshape(W, -1).tolist()
    assert seen == [sizes[0], *sizes, *sizes]  # the first compiles
    assert str(profile).startswith("experts_of_a_rank: busiest rank")


def test_only_of_known_routings_of_all_ranks():
    *_, index = draw()
    with pytest.raises(TypeError, match=r"Routing.describe: the plan is traced"):
        jax.jit(lambda i: routing_of(i).describe())(index)


def test_a_picture_of_the_load(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need it: install the plots extra")
    *_, index = draw(0, lowest=0)
    experts.plot_load(routing_of(index), tmp_path / "load.svg")
    assert {"capacity", "mean", "rank", "rows"} <= set(texts(tmp_path / "load.svg"))
