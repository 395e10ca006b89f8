"""Every operation between processes; the launcher runs this file in each process.

    python -m jax_cp_dispatch.launch --processes 2 --devices 4 tests/processes/suite.py

The cases of the contract, groups, programs beside each other, and GEMMs with buffers. Every process
computes the expected results of all ranks, and compares those of its own ranks.
Arguments: --short, and names of tests.
"""

import pathlib
import sys
import threading

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name) for name in ("contract", "oracles", "support")
)

import gemms
import jax
import numpy as np
from contract import Case, on_ranks as case_on_ranks, specs_of, split, with_gradients
from movement_oracle import dispatched
from operations import CASES
from places import AXIS, all_devices, check, draw, mesh_of_all, on_ranks, place, place_all, plan_of
from program_sets import SETS, Program, Structure, check_close

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


MOVES = ("dispatch", "many"), ("dispatch", "loop")
PRODUCTS = ("all_gather_matmul ring", "loop"), ("matmul_reduce_scatter pipeline", "many")


def test_programs(calls=(*MOVES, *PRODUCTS)):
    """Groups in one process and across, several calls and loops, and arrays of all ranks."""
    num_devices = jax.device_count()
    orders = tuple(range(num_devices)), tuple(map(jax.devices().index, all_devices()))
    check_program(Structure(1, orders[1], "float32", True, (*calls[1:], ("combine", "gradients"))))
    for groups in sorted({2, num_devices // 2}) if num_devices >= 4 else [1]:
        for order in orders[IS_SHORT:]:
            check_program(Structure(groups, order, "float32", False, calls[:2]))


def check_program(structure, **options):
    program, calls = Program(structure, **options), len(structure.calls)
    seeds = np.arange(calls * structure.groups * SETS).reshape(calls, structure.groups, SETS)
    operands, expected = program.draw(seeds)
    for _ in range(2):
        program.check(program.start(operands, program.inputs()), expected, 0)


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
