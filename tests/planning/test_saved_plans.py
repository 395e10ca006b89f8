"""Plans and placements that were saved: read again, or refused in words."""

import pickle
from typing import Any

import jax
import numpy as np
import pytest

from jax_cp_dispatch import PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.masks import PrefixLM

IN_PREFIX = np.isin(np.arange(32), [0, 1, 2, 20, 21])[None]


def made(kind) -> Any:
    if kind == "traced":
        ids = np.repeat(np.arange(1, 3, dtype=np.int32), 16)[None]
        return jax.jit(lambda x: plan_attention(x, world_size=2, config=PlanConfig(block=4)))(ids)
    if kind == "moved":
        return plan_attention(lengths=[20, 12], world_size=2)
    placement = place_tokens([20, 12], world_size=2, masks=["full", PrefixLM(IN_PREFIX)])
    return placement if kind == "placement" else placement.plans[1]


@pytest.mark.parametrize("kind", ["moved", "traced", "placed", "placement"])
def test_a_saved_plan_is_read_again(kind):
    plan = made(kind)
    if kind == "placement":
        plan.inverse  # noqa: B018 - is cached, and not saved
    read = pickle.loads(pickle.dumps(plan))
    fields = lambda x: (x.plans, x.source) if kind == "placement" else x
    assert jax.tree.structure(fields(read)) == jax.tree.structure(fields(plan))
    jax.tree.map(np.testing.assert_array_equal, fields(read), fields(plan))
    assert "inverse" not in vars(read)


@pytest.mark.parametrize(
    "kind, was, then, says",
    [
        ("moved", b"K\x01", b"K\x63", "in format 99 of plans, but this version .* reads format 1"),
        ("moved", b"run_row", b"row_run", "run"),  # a field
        ("moved", b"jax_cp_dispatch.metadata", b"jax_cp_dispatch.datameta", "datameta"),  # a module
        ("placement", b"K\x01", b"K\x63", "in format 99 of plans"),
        ("placement", b"PlanConfig", b"PlanChoice", "PlanChoice"),  # a class
    ],
)
def test_a_plan_of_another_version_is_refused_in_words(kind, was, then, says):
    plan = made(kind)
    saved = pickle.dumps(plan)
    assert was in saved
    advice = "Plan the batch again, with this version of jax_cp_dispatch"
    with pytest.raises(ValueError, match=rf"(?s)^{type(plan).__name__}: .*{says}.*{advice}"):
        pickle.loads(saved.replace(was, then, 1))
