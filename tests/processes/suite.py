"""Every operation between processes; the launcher runs this file in each process.

    python -m jax_cp_dispatch.launch --processes 2 --devices 4 tests/processes/suite.py

The cases of the contract, groups, programs beside each other, and GEMMs with buffers. Every process
computes the expected results of all ranks, and compares those of its own ranks.
Arguments: --short, and names of tests.
"""

import itertools
import pathlib
import sys
import threading
from typing import Any

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name) for name in ("contract", "oracles", "support")
)

import gemms
import jax
import numpy as np
from contract import TOLERANCE, Case, on_ranks as case_on_ranks, specs_of, split, with_gradients
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from movement_oracle import dispatched
from operations import CASES
from places import (
    AXIS,
    T,
    all_devices,
    check,
    draw,
    mesh_of_all,
    on_ranks,
    place,
    place_all,
    plan_of,
)

import jax_cp_dispatch as cp

IS_SHORT = "--short" in sys.argv  # compiles fewer programs

# They take long to compile, and exchange as "placed", "ring" and "dispatch" do. Not in short.
LONG = ("balanced", "zigzag", "halo", "hamilton", "ulysses", "latents", "placed layers", "shift")
LONG += ("causal_conv", "recurrence", "gated_delta_rule", "linear_attention", "linear_recurrence")
LONG += ("experts",)


def test_cases():
    """Values and gradients of the contract's cases, in float64."""
    with jax.enable_x64(True):
        for case in CASES:
            if not case.is_local and not (IS_SHORT and case.name in LONG):
                check_case(case, "float64")


def check_case(case: Case, dtype: str) -> None:
    """Compares results and gradients of this process's ranks with the oracle's."""
    mesh = mesh_of_all()
    arrays = case.arrays(dtype, ranks=mesh.size)
    *expected, cotangents = case.expected(arrays)
    floats, others = split(arrays)
    operands = (case.specs, floats), (case.specs, others), (case.results, cotangents)
    program = jax.jit(with_gradients(case_on_ranks(case, mesh, check_vma=False)))
    got = program(*(place_all(x, mesh, specs_of(specs, x, (AXIS,))) for specs, x in operands))
    check_close(got, tuple(expected), dtype, case)


def check_close(got, expected, dtype, case) -> None:
    """Compares the part of this process's ranks, within the tolerance of the contract."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    named = jax.tree.leaves_with_path(expected)
    for (path, want), x in zip(named, jax.tree.leaves(got), strict=True):
        name = f"{case}{jax.tree_util.keystr(path)}"
        assert x.shape == want.shape and x.dtype == dtype, name
        atol = TOLERANCE[dtype] * max(1.0, np.abs(want).max(initial=0))
        for shard in x.addressable_shards:
            part = np.asarray(shard.data).astype(np.float64)
            np.testing.assert_allclose(part, want[shard.index], rtol=0, atol=atol, err_msg=name)


def test_groups_in_one_process_and_across():
    """Along one of two axes; a group may be inside one process, next to other groups."""
    if jax.device_count() < 4:
        return
    shapes = {(2, jax.device_count() // 2), (jax.device_count() // 2, 2)}
    for shape, devices in itertools.product(
        sorted(shapes), (np.array(jax.devices()), all_devices())
    ):
        dispatch_in_groups(Mesh(devices.reshape(shape), ("data", AXIS)), *shape)


def dispatch_in_groups(mesh, num_groups, num_ranks):
    plans = [plan_of(seed, num_ranks) for seed in range(num_groups)]
    capacity = max(capacity for _, capacity in plans)
    x = np.stack([draw(seed, num_ranks, 2) for seed in range(num_groups)])
    names = [name for name in plans[0][0] if name != "world_size"]
    fields: dict[str, Any] = {name: np.stack([plan[name] for plan, _ in plans]) for name in names}
    spec = P("data", AXIS)

    def local(x, m):
        m = jax.tree.map(lambda a: a[0, 0], m)
        return cp.dispatch(x[0, 0], m, axis_name=AXIS, capacity=capacity)[None, None]

    move = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    m = cp.Metadata(**fields, world_size=num_ranks)
    x_and_m = jax.tree.map(lambda a: place(a, mesh, spec), (x, m))
    check(
        move(*x_and_m),
        np.stack([dispatched(plan, x[i], capacity) for i, (plan, _) in enumerate(plans)]),
    )


def test_calls_of_one_program_are_distinguished():
    """Independent equal calls, an inner function called twice, a loop."""
    mesh, W = mesh_of_all(), jax.device_count()
    plan, capacity = plan_of(5, W)
    capacity = max(capacity, T)
    x = draw(0, W, 2)

    def move(x, m):
        return cp.dispatch(x, m, axis_name=AXIS, capacity=capacity)[:T]

    inner = jax.jit(move)

    def program(x, m):
        independent = sum(k * move(x * k, m) for k in range(1, 7))
        twice = inner(x, m) + 3 * inner(x * 5, m)
        looped = jax.lax.scan(lambda y, _: (move(y, m) + 1, None), x, None, length=5)[0]
        return independent, twice, looped

    m = jax.tree.map(lambda a: place(a, mesh), cp.Metadata(**plan))
    one = dispatched(plan, x, capacity)[:, :T]
    looped = x
    for _ in range(5):
        looped = dispatched(plan, looped, capacity)[:, :T] + 1
    run = on_ranks(program, mesh)
    got = [run(place(x, mesh), m) for _ in range(3)][-1]
    for result, want in zip(got, (one * 91, one * 16, looped), strict=True):
        check(result, want.astype(np.float32))


def test_programs_of_one_process_do_not_interfere():
    """With equal calls: one process compiles one, and a thread of it only lowers one.

    Then two threads of each process lower one each, and compile them in turn, in another order
    there; all processes run both.
    """
    mesh, W = mesh_of_all(), jax.device_count()
    plan, capacity = plan_of(6, W)
    x, m = jax.tree.map(lambda a: place(a, mesh), (draw(0, W, 2), cp.Metadata(**plan)))
    move = lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity, deadline=20.0)
    lower = lambda factor: on_ranks(lambda x, m: factor * move(x, m), mesh).lower(x, m)
    is_other = jax.process_index() == jax.process_count() - 1
    if is_other:
        lower(3).compile()
        log = threading.Thread(target=lower, args=(4,))
        log.start()
        log.join()
    compiled, all_lowered = {}, threading.Barrier(2)
    turns = [threading.Event() for _ in range(3)]
    turns[0].set()

    def compile_one(factor, turn, next_turn):
        lowered = lower(factor)
        all_lowered.wait()
        turn.wait()
        compiled[factor] = lowered.compile()
        next_turn.set()

    order = (2, 5) if is_other else (5, 2)
    for i, factor in enumerate(order):
        threading.Thread(target=compile_one, args=(factor, *turns[i : i + 2])).start()
    turns[-1].wait()
    for factor in (2, 5):
        check(compiled[factor](x, m), factor * dispatched(plan, draw(0, W, 2), capacity))


def test_arrays_of_all_ranks():
    W = jax.device_count()
    plan, capacity = plan_of(7, W)
    x, m = draw(0, W, 3), cp.Metadata(**plan)
    for kind in (AxisType.Auto, AxisType.Explicit)[: 1 if IS_SHORT else 2]:
        mesh = Mesh(all_devices(), (AXIS,), axis_types=(kind,))
        with jax.set_mesh(mesh):
            move = jax.jit(lambda x: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity))
            got = move(place(x.reshape(W * T, 3), mesh))
        check(got, dispatched(plan, x, capacity).reshape(W * capacity, 3))


def test_an_invalid_plan_is_rejected_on_all_ranks():
    mesh, W = mesh_of_all(), jax.device_count()
    plan, capacity = plan_of(8, W)
    bad = {**plan, "num_recv_tokens": plan["num_recv_tokens"].copy()}
    bad["num_recv_tokens"][W - 1, 0] += 1
    move = on_ranks(lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity), mesh)
    x = draw(0, W, 2)
    for fields, is_good in ((plan, True), (bad, False), (plan, True)):
        m = jax.tree.map(lambda a: place(a, mesh), cp.Metadata(**fields))
        try:
            check(move(place(x, mesh), m), dispatched(plan, x, capacity))
            assert is_good
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            assert not is_good
            assert f"rank {W - 1} expects" in str(error), error


def test_choice():
    choice = cp.initialize()  # again: the same
    assert choice.implementation == "shared_memory"
    found = cp.available_implementations()
    assert found["shared_memory"] == (True, choice.reason)
    assert "it serves those of one" in found["in_process"].reason


def main():
    choice = cp.initialize()
    assert choice.implementation == "shared_memory", choice
    tests = {**globals(), **vars(gemms)}
    asked = [name for name in sys.argv if name in tests]
    names = asked or [name for name in tests if name.startswith("test_")]
    for name in names:
        tests[name]()
        print(f"{name} ok", flush=True)
    print(f"all {len(names)} ok", flush=True)


if __name__ == "__main__":
    main()
