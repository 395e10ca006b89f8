"""Whether a batch fits given capacities: known before a step, inside it, and from the error."""

import dataclasses
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import AXIS, mesh_of
from packed_batches import pack

from jax_cp_dispatch import Balanced, PlanConfig, context_parallel_attention, plan_attention
from jax_cp_dispatch.planning import needs_inside_jit

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "plans.md"
W, T, BLOCK = 8, 128, 4
NAMES = ("q_capacity", "kv_capacity", "max_q_transfers", "max_kv_transfers", "max_pieces")
# Short documents fit, a long one does not.
SMALL = PlanConfig(BLOCK, 24, 40, max_q_transfers=4, max_kv_transfers=4, max_pieces=4)
SHORT = np.repeat(np.arange(1, 1 + T // 8, dtype=np.int32), 8)[None]
LONG = np.ones((1, T), np.int32)


# Of any two rows of T columns, with all the room there is.
plan_inside = jax.jit(lambda *x: plan_attention(*x, world_size=W, config=PlanConfig(BLOCK)))


def needs_of(plan):
    """Counted from a plan that has all the room there is."""
    metadata = plan.q_metadata, plan.kv_metadata
    received = [np.asarray(x.num_total_recv_tokens).max() for x in metadata]
    sent = [(np.asarray(x.dst_rank) >= 0).sum(-1).max() for x in metadata]
    pieces = (np.asarray(plan.run_row) < np.asarray(plan.num_rows)[:, None]).sum(1).max()
    return *received, *sent, pieces


def test_needs_inside_jit_are_those_of_the_plan():
    rng = np.random.default_rng()
    for _ in range(10):
        segment_ids, positions = pack(rng, 2, T, max_length=int(rng.integers(2, T)))
        config = PlanConfig(BLOCK)
        plan = plan_inside(segment_ids, positions)
        needs = needs_inside_jit(segment_ids, positions, world_size=W, config=config)
        assert tuple(getattr(needs, name) for name in NAMES) == needs_of(plan)
        assert plan.needs == dataclasses.replace(needs, block=None) and plan.fits
        assert needs.fits(needs)
        assert config.fits(needs)
        for name in NAMES:
            if getattr(needs, name) > 1:
                less = dataclasses.replace(needs, **{name: getattr(needs, name) - 1})
                assert not less.fits(needs)


def test_fits_is_known_on_the_host():
    """Inside a program: the documented step, below."""
    needs = [needs_inside_jit(x, world_size=W, config=SMALL) for x in (SHORT, LONG)]
    assert [SMALL.fits(x) for x in needs] == [True, False]
    assert plan_attention(LONG, world_size=W).fits


def attend(x, segment_ids, config):
    x = x[..., None, :]
    return context_parallel_attention(
        *(x, x, x),
        mesh=mesh_of(W),
        axis_name=AXIS,
        algorithm=Balanced(config),
        segment_ids=segment_ids,
    )


def test_the_documented_step_keeps_its_donated_state_if_the_batch_does_not_fit():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    (code,) = (x for x in blocks if "def train_step" in x)
    names: dict[str, Any] = {}
    exec(code, names)
    train_step = names["train_step"]
    rng = np.random.default_rng()
    before = rng.normal(size=(8, 8)).astype(np.float32)
    x = rng.normal(size=(1, T, 8)).astype(np.float32)
    state = jnp.array(before)
    kept, fits = train_step(state, x, LONG)
    assert not fits and state.is_deleted()
    assert np.asarray(kept).tobytes() == before.tobytes()
    changed, fits = train_step(kept, x, SHORT)
    assert fits and np.isfinite(changed).all()
    assert not np.array_equal(changed, before)


def test_the_error_names_sufficient_capacities():
    """They are the largest needs of all ranks, which fit, by the names of the arguments."""
    x = np.random.default_rng().normal(size=(1, T, 8)).astype(np.float32)
    # The last ranks have most local work, so the first rank's needs are not the largest.
    segment_ids = np.concatenate([SHORT[:, : T // 2], np.full((1, T // 2), 99, np.int32)], axis=1)
    config = PlanConfig(BLOCK, q_capacity=17, kv_capacity=20)
    run = jax.jit(lambda ids: attend(x, ids, config))
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(run(segment_ids))
    assert "plan 1" not in str(error.value)
    asked = re.findall(r"Pass PlanConfig\.(\w+)>=(\d+)", str(error.value))
    needs = needs_inside_jit(segment_ids, world_size=W, config=config)
    asked = {name: int(value) for name, value in asked}
    needed = {name: getattr(needs, name) for name in NAMES[:2]}
    assert asked == {name: need for name, need in needed.items() if need > getattr(config, name)}
    assert dataclasses.replace(config, **asked).fits(needs)


@pytest.mark.parametrize("name", NAMES[2:])
def test_a_list_that_is_cut_off_fails_on_all_ranks(name):
    """Also if only key ranges are missing: without them, attention would be wrong."""
    x = np.random.default_rng().normal(size=(1, T, 8)).astype(np.float32)
    sizes: dict[str, Any] = {name: 1}
    config = PlanConfig(BLOCK, **sizes)
    segment_ids = np.concatenate([SHORT[:, : T // 2], np.full((1, T // 2), 99, np.int32)], axis=1)
    assert not config.fits(needs_inside_jit(segment_ids, world_size=W, config=config))
    out = jax.jit(lambda ids: attend(x, ids, config))(segment_ids)
    for shard in out.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"a static bound .*{name}"):
            np.asarray(shard.data)
