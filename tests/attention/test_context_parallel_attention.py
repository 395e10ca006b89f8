"""The call on global arrays: axes of batch and heads, algorithms as values, and "auto"."""

import copy
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from on_mesh import AXIS, mesh_of, permuted_mesh
from sequences import Case, check, draw

from jax_cp_dispatch import (
    Auto,
    Balanced,
    Documents,
    Hamilton,
    PlanConfig,
    Ring,
    Zigzag,
    choose_algorithm,
    context_parallel_attention,
)
from jax_cp_dispatch.attention import auto, context_parallel
from jax_cp_dispatch.attention.choose import choose_for
from jax_cp_dispatch.attention.operands import Outputs
from jax_cp_dispatch.attention.rotating.schedules import CycleSchedule
from jax_cp_dispatch.cost import HARDWARE
from jax_cp_dispatch.masks import SlidingWindow
from jax_cp_dispatch.planning.on_host import plan_on_host
from jax_cp_dispatch.profiling import Choice

T = 14


def program(mesh, **options):
    """`(q, k, v, g, segment_ids, positions) -> (out, dq, dk, dv)`; documents may be concrete."""

    def run(q, k, v, g, segment_ids, positions):
        documents = {"segment_ids": segment_ids, "positions": positions}

        @jax.jit
        def both(q, k, v, g):
            attend = partial(
                context_parallel_attention, mesh=mesh, axis_name=AXIS, **documents, **options
            )
            out, pull_back = jax.vjp(attend, q, k, v)
            return out, *pull_back(g)

        return both(q, k, v, g)

    return run


def test_explicit_axes_shard_equal_parts_only():
    """So they shard neither these tokens nor the result."""
    case = Case("ring", 1, T, documents="both", batch=2, heads=(4, 2))
    mesh = permuted_mesh((3,), (AXIS,), AxisType.Explicit)
    with jax.set_mesh(mesh):
        check(case, draw(case), program(mesh, algorithm="ring"))


def test_two_axes_of_the_batch():
    """One for the batch and one for the heads: test_mesh_axes.py."""
    case = Case("ring", 1, T, documents="segments", batch=4, heads=(4, 2))
    mesh = permuted_mesh((2, 2, 2), ("data", AXIS, "model"))
    check(case, draw(case), program(mesh, algorithm="ring", batch_axis=("data", "model")))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("told_by", ["segments", "positions"])
def test_auto_sees_the_documents(layout, told_by, monkeypatch):
    """`"auto"` receives them in sequence order, for one group of the batch, with the mask."""
    lengths = ((5, 1, 6), (3, 9))
    rows = [[(n, at) for n, length in enumerate(row) for at in range(length)] for row in lengths]
    segment_ids, positions = np.tile(np.moveaxis(np.array(rows), -1, 0), (1, 2, 1))
    if told_by == "segments":
        given: dict[str, Any] = {"segment_ids": segment_ids + 1}
    else:
        given = {"positions": positions}
    if layout == "zigzag":
        given = {"documents": Documents(**{"segment_ids": 0 * segment_ids + 1, **given}).zigzag(2)}
    seen = {}

    def choose(workload, moves, **options):
        seen.update(options, **vars(workload))
        return choose_for(workload, moves, **options)

    monkeypatch.setattr(auto, "choose_for", choose)
    x = np.ones((4, 12, 2, 8), np.float32)
    mesh = permuted_mesh((2, 2), ("data", AXIS))
    options = {"mask": SlidingWindow(4), "batch_axis": "data"}
    attend = partial(context_parallel_attention, mesh=mesh, axis_name=AXIS, algorithm="auto")
    jax.eval_shape(partial(attend, **given, **options), x, x, x)
    assert seen["lengths"] == lengths
    assert (seen["layout"], seen["tokens_per_rank"]) == (layout, 6)
    assert seen["mask"] == SlidingWindow(4)


ROWS = np.array([[0, 1]])
MAPS = [[-1, 0], [0, -1]]
EQUAL = [
    ("balanced", Balanced(PlanConfig())),
    ("ring", Ring()),
    ("zigzag", Zigzag()),
    ("hamilton", Hamilton()),
    (Hamilton(nodes=2), Hamilton(nodes=2)),
    (Hamilton(cycles=ROWS), Hamilton(cycles=ROWS.tolist())),
    (Hamilton(maps=(MAPS, MAPS)), Hamilton(maps=(np.array(MAPS), np.array(MAPS)))),
    ("auto", Auto(hardware=None)),
]


@pytest.mark.parametrize("one, other", EQUAL, ids=str)
def test_equal_algorithms_share_a_program(one, other, monkeypatch):
    """Objects compare by value: an equal object causes no new trace."""
    traced: list[Any] = []
    on_all_ranks = context_parallel.on_all_ranks

    def counted(*operands, **options):
        traced.append(operands)
        return on_all_ranks(*operands, **options)

    monkeypatch.setattr(context_parallel, "on_all_ranks", counted)
    x = np.ones((1, 8, 1, 4), np.float32)
    attend = partial(context_parallel_attention, x, x, x, mesh=mesh_of(2), axis_name=AXIS)
    trace = lambda algorithm: jax.eval_shape(lambda: attend(algorithm=algorithm))
    jax.clear_caches()
    trace(one)
    num_traces = len(traced)
    assert num_traces > 0
    trace(other)
    assert len(traced) == num_traces
    trace(Hamilton(cycles="direct"))
    assert len(traced) > num_traces


def test_algorithms_are_values():
    algorithms = [x for pair in EQUAL for x in pair if not isinstance(x, str)]
    assert len(set(algorithms)) == len(EQUAL)
    assert Hamilton(cycles=ROWS).cycles == ((0, 1),)
    assert Hamilton(cycles=ROWS).schedule("a test", 2) == CycleSchedule(((0, 1),))
    assert all(copy.deepcopy(x) == x and hash(copy.deepcopy(x)) == hash(x) for x in algorithms)


def test_a_choice_can_be_passed_on():
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_size": 4, "itemsize": 4}
    hardware = dataclasses.replace(HARDWARE["mi300x"], ranks_per_node=2, rail_bandwidth=1e9)
    options = {"num_ranks": 4, "tokens_per_rank": 2**14, "layout": "zigzag", **sizes}
    choice = choose_algorithm(None, hardware=hardware, **options)
    assert choice.algorithm == Hamilton(nodes=2)
    x = jax.ShapeDtypeStruct((1, 16, 1, 4), np.float32)
    where = {"mesh": mesh_of(4), "axis_name": AXIS, "algorithm": choice.algorithm}
    assert jax.eval_shape(partial(context_parallel_attention, **where), x, x, x).shape == x.shape


@pytest.fixture
def plans(monkeypatch):
    """The configs of plans that are made on the host."""
    configs = []

    def plan(request, **options):
        configs.append(request.config)
        return plan_on_host(request, **options)

    monkeypatch.setattr("jax_cp_dispatch.planning.plan_batch.plan_on_host", plan)
    return configs


@pytest.fixture
def programs(monkeypatch):
    """The algorithm of each program, and whether it follows a plan; they are not run."""
    seen = []

    def attend(operands, plan, packed, *, algorithm, **options):
        seen.append((algorithm, plan is not None))
        q, _, v, *_ = operands
        return Outputs(jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype))

    monkeypatch.setattr(context_parallel, "_program", attend)
    return seen


def attend_auto(config):
    """Short documents on 8 GPUs, for which balanced attention is predicted to be the fastest."""
    shapes = (32, 128), (8, 128), (8, 1)
    q, k, v = (np.broadcast_to(np.float16(0), (1, 2**16, *shape)) for shape in shapes)
    segment_ids = np.arange(2**16, dtype=np.int32)[None] // 512 + 1
    context_parallel_attention(
        *(q, k, v),
        mesh=mesh_of(8),
        axis_name=AXIS,
        algorithm=Auto(hardware=HARDWARE["h100"], config=config),
        segment_ids=segment_ids,
    )


def test_auto_plans_once(plans, programs):
    """With its config; the call follows the plan of the prediction."""
    config = PlanConfig(block=2)
    attend_auto(config)
    assert plans == [config]
    assert programs == [(Balanced(config), True)]


def test_auto_plans_once_for_another_choice(plans, programs, monkeypatch):
    seen = {}

    def choose(workload, moves, **options):
        seen.update(moves=moves, **options)
        return Choice(Ring(), {}, ""), {}

    monkeypatch.setattr(auto, "choose_for", choose)
    attend_auto(PlanConfig())
    assert seen["hardware"] == HARDWARE["h100"] and seen["moves"][Balanced()] is not None
    assert len(plans) == 1
    assert programs == [(Ring(), False)]


def test_auto_without_a_plan_that_fits(plans, programs):
    """A batch that does not fit the capacities of balanced attention gets another algorithm."""
    config = PlanConfig(max_pieces=1)
    attend_auto(config)
    assert plans == [config]
    [(algorithm, has_plan)] = programs
    assert not isinstance(algorithm, Balanced) and not has_plan


def test_ulysses_needs_heads_for_every_rank():
    x = np.ones((1, T, 3, 8), np.float32)
    options = {"mesh": mesh_of(2), "axis_name": AXIS}
    with pytest.raises(ValueError, match=r"3 heads but there are 2 ranks.*'zigzag' or 'balanced'"):
        context_parallel_attention(x, x, x, algorithm="ulysses", **options)
