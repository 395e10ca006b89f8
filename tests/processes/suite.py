"""Tests of every operation between processes; the launcher runs this file in each process.

    python -m jax_cp_dispatch.launch --processes 2 --devices 4 tests/processes/suite.py

Every process computes the expected results of all ranks, and compares those of its own ranks.
Arguments: --short, names of tests, and the path of the file that `gemms.py` has written.
"""

import dataclasses
import itertools
import pathlib
import sys
import threading
from typing import Any

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import gemms
import jax
import jax.numpy as jnp
import numpy as np
import sequence_oracle
from attention_oracle import attention, attention_gradients
from experts_oracle import evenly, grouped_rows, summed_rows
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched
from places import (
    AXIS,
    IS_SHORT,
    T,
    all_devices,
    check,
    draw,
    mesh_of_all,
    on_ranks,
    place,
    plan_of,
)

import jax_cp_dispatch as cp


def test_dispatch_and_combine_with_replicas():
    mesh, W = mesh_of_all(), jax.device_count()
    for seed, replicas in itertools.product(range(2), (1, 3)):
        plan, capacity = plan_of(seed, W, replicas)
        arrays = {
            "float32": draw(seed, W, 3, 2),
            "bfloat16": draw(seed + 1, W, 8, dtype=jnp.bfloat16),
            "bytes": draw(seed + 2, W, 7, dtype=np.uint8),
        }

        def there_and_back(x, m, capacity=capacity):
            y = cp.dispatch(x, m, axis_name=AXIS, capacity=capacity)
            return y, cp.combine(y, m, axis_name=AXIS, num_tokens=T)

        x, m = jax.tree.map(lambda a: place(a, mesh), (arrays, cp.Metadata(**plan)))
        there, back = on_ranks(there_and_back, mesh)(x, m)
        for name, whole in arrays.items():
            want = dispatched(plan, whole, capacity)
            check(there[name], want)
            check(back[name], combined(plan, want, T).astype(whole.dtype))


def test_tokens_to_experts():
    """A routing, its rows and sums, which XLA gives too, with their gradients.

    And the first token of each rank by `ragged_all_to_all`.
    """
    mesh, W = mesh_of_all(), jax.device_count()
    index = np.random.default_rng(0).integers(-1, 2 * W, (W, T, 3)).astype(np.int32)
    x, weights, num_rows = draw(0, W, 8), draw(1, W, 3), W * T * 3

    def layer(x, weights, index):
        routing = cp.experts.route(index, num_experts=2 * W, axis_name=AXIS, capacity=num_rows)
        rows = cp.experts.dispatch_tokens(x, routing)
        options = dataclasses.replace(routing.options, implementation="xla")
        by_xla = dataclasses.replace(routing, options=options)
        outs = []
        for of in routing, by_xla:
            run = lambda x, w, of=of: cp.experts.combine_tokens(x, w, of)
            out, pull = jax.vjp(run, rows, weights)
            outs.append((out, *pull(out)))
        none, one = jnp.zeros(W, jnp.int32), jnp.ones(W, jnp.int32)
        at = jnp.full(W, jax.lax.axis_index(AXIS))
        firsts = cp.ragged_all_to_all(x, 0 * x, none, one, at, one, axis_name=AXIS)
        return rows, routing.group_sizes, outs[0][0], firsts[:W], outs

    arrays = jax.tree.map(lambda a: place(a, mesh), (x, weights, index))
    held = evenly(2 * W, W)
    rows, sizes = grouped_rows(x, index, held, num_rows)
    want = rows, sizes, summed_rows(rows, weights, index, held), np.stack([x[:, 0]] * W)
    *got, outs = on_ranks(layer, mesh)(*arrays)
    jax.tree.map(check, tuple(got), want)
    for one, other in zip(*outs, strict=True):
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(a.data, b.data)


def test_gradient_is_the_adjoint():
    mesh, W = mesh_of_all(), jax.device_count()
    plan, capacity = plan_of(3, W, 2)
    x, g = draw(0, W, 4), np.random.default_rng(1).integers(0, 9, (W, capacity, 4)).astype("f")

    def gradient(x, g, m):
        move = lambda x: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity)
        return jax.vjp(move, x)[1](g)[0]

    m = jax.tree.map(lambda a: place(a, mesh), cp.Metadata(**plan))
    got = on_ranks(gradient, mesh)(place(x, mesh), place(g, mesh), m)
    check(got, combined(plan, g, T).astype(np.float32))


def test_groups_in_one_process_and_across():
    """Along one of two axes; a group may be inside one process, next to other groups."""
    if jax.device_count() < 4:
        return
    for shape in ((2, jax.device_count() // 2), (jax.device_count() // 2, 2)):
        for devices in (np.array(jax.devices()), all_devices()):
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
    for kind in AxisType.Auto, AxisType.Explicit:
        mesh = Mesh(all_devices(), (AXIS,), axis_types=(kind,))
        with jax.set_mesh(mesh):
            move = jax.jit(lambda x: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity))
            got = move(place(x.reshape(W * T, 3), mesh))
        check(got, dispatched(plan, x, capacity).reshape(W * capacity, 3))


def test_attention():
    """Every algorithm, forward and backward, against dense attention of two documents."""
    mesh, W = Mesh(all_devices(), (AXIS,), axis_types=(AxisType.Auto,)), jax.device_count()
    tokens = 4 * W
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, tokens, 4, 8)).astype("f")
    k, v = rng.normal(size=(2, 1, tokens, 2, 8)).astype("f")
    g = rng.normal(size=q.shape).astype("f")
    segments = np.repeat([1, 2], [tokens - 5, 5])[None]
    start = np.where(segments == 1, 0, tokens - 5)
    end = np.arange(tokens)[None] + 1
    out, lse = attention(q, k, v, start, end)
    want = out, *attention_gradients(q, k, v, start, end, g, np.zeros_like(lse))
    balanced = cp.Balanced(cp.PlanConfig(block=2))
    for algorithm in (balanced, "ring", "zigzag", "hamilton")[: 2 if IS_SHORT else 4]:

        def attend(q, k, v, algorithm=algorithm):
            return cp.context_parallel_attention(
                q, k, v, mesh=mesh, axis_name=AXIS, algorithm=algorithm, segment_ids=segments,
            )  # fmt: skip

        def both(q, k, v, g, attend=attend):
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(g)

        spec = P(None, AXIS)
        program = jax.jit(both, out_shardings=NamedSharding(mesh, spec))
        for got, expected in zip(
            program(*(place(a, mesh, spec) for a in (q, k, v, g))), want, strict=True
        ):
            check(got, expected.astype(np.float32), exact=False)


def test_a_recurrence():
    """The delta rule, forward and backward, of a document that all ranks hold and a short one.

    Not in short: it takes long to compile, and makes exchanges like all others.
    """
    if IS_SHORT:
        return
    mesh, tokens = Mesh(all_devices(), (AXIS,), axis_types=(AxisType.Auto,)), 4 * jax.device_count()
    rng = np.random.default_rng(0)
    q, k, v, g = rng.normal(size=(4, 1, tokens, 2, 4)).astype("f")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, beta = -rng.random((1, tokens, 2), "f"), rng.random((1, tokens, 2), "f")
    operands, ids = (q, k, v, log_decay, beta), np.repeat([1, 2], [tokens - 2, 2])[None]
    want = [np.zeros(x.shape, "f") for x in (g, *operands)]
    for row, a, b in sequence_oracle.documents(ids):
        *of, of_g = (x[row, a:b].astype(float) for x in (*operands, g))
        results = sequence_oracle.recurrence(*of, scale=0.5, g=of_g)
        for x, result in zip(want, results, strict=True):
            x[row, a:b] = result

    def both(g, *operands):
        layer = lambda *x: cp.sequence.gated_delta_rule(
            *x, mesh=mesh, axis_name=AXIS, segment_ids=ids
        )
        out, pull = jax.vjp(layer, *operands)
        return out, *pull(g)

    spec = P(None, AXIS)
    program = jax.jit(both, out_shardings=NamedSharding(mesh, spec))
    for got, expected in zip(
        program(*(place(a, mesh, spec) for a in (g, *operands))), want, strict=True
    ):
        check(got, expected, exact=False)


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
