"""dispatch and combine in every supported context: meshes, axis types, placed arrays, loops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import (
    CAPACITY,
    METADATA,
    PLAN,
    F,
    S,
    T,
    W,
    X,
    Y,
    check_all_ranks,
    integers,
    moves_and_gradients,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, permuted_mesh

from jax_cp_dispatch import Metadata, combine, dispatch


def axes_of(array):
    """Returns how an array is sharded, without trailing unsharded dimensions."""
    spec = [entry[0] if isinstance(entry, tuple) else entry for entry in array.sharding.spec]
    return tuple(spec + [None] * (array.ndim - len(spec)))


# ---- Under plain jit, on a shuffled mesh (tp, cp): each index of tp is a separate group.


def tp_mesh(kind: Any = AxisType.Auto):
    return permuted_mesh((2, W), ("tp", AXIS), kind)


def check_split(results):
    """Rows are sharded over the ranks; features keep their sharding."""
    for array in results:
        assert axes_of(array) == (AXIS, "tp")


@pytest.mark.parametrize("rows, metadata_spec", [(AXIS, P(AXIS)), (None, P())])
def test_placed_arrays(rows, metadata_spec):
    """Rows may be unsharded, and metadata split over the ranks."""
    mesh = tp_mesh()
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P(rows, "tp")))
    metadata = jax.device_put(METADATA, NamedSharding(mesh, metadata_spec))
    run = jax.jit(moves_and_gradients).lower(x, y, metadata).compile()
    assert rows is None or "all-gather" not in str(run.as_text())
    results = run(x, y, metadata)
    check_all_ranks(results)
    check_split(results)


def test_numpy_arguments_with_in_shardings():
    split = NamedSharding(tp_mesh(), P(AXIS, "tp"))
    results = jax.jit(moves_and_gradients, in_shardings=(split, split, None))(X, Y, METADATA)
    check_all_ranks(results)
    check_split(results)


def test_numpy_arguments_with_mesh():
    """Or with `jax.set_mesh`."""
    run = jax.jit(lambda *args: moves_and_gradients(*args, mesh=tp_mesh()))
    check_all_ranks(run(X, Y, METADATA))
    with jax.set_mesh(tp_mesh()):
        sent = jax.jit(lambda x: dispatch(x, METADATA, axis_name=AXIS, capacity=CAPACITY))(X)
    expected = dispatched(PLAN, X.reshape(W, T, F), CAPACITY)
    np.testing.assert_array_equal(sent, expected.reshape(Y.shape))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_jit(kind):
    mesh = tp_mesh(kind)
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P(AXIS, "tp")))
    results = moves_and_gradients(x, y, METADATA)
    check_all_ranks(results)
    check_split(results)
    unplaced = jnp.asarray(X)
    sent = dispatch(unplaced, METADATA, axis_name=AXIS, capacity=CAPACITY, mesh=mesh)
    np.testing.assert_array_equal(sent, results[0])


@pytest.mark.parametrize("is_set", [True, False], ids=["set_mesh", "typed arguments"])
def test_explicit_axes_appear_in_the_types(is_set):
    mesh = tp_mesh(AxisType.Explicit)
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P(AXIS, "tp")))
    types = []

    @jax.jit
    def run(*args):
        results = moves_and_gradients(*args)
        types.extend(jax.typeof(result) for result in results)
        return results

    def compile_and_run():
        compiled = run.lower(x, y, METADATA).compile()
        assert "all-gather" not in str(compiled.as_text())
        return compiled(x, y, METADATA)

    if is_set:
        with jax.set_mesh(mesh):
            results = compile_and_run()
    else:
        results = compile_and_run()
    check_all_ranks(results)
    check_split(results)
    assert all(axes_of(kind) == (AXIS, "tp") for kind in types)


@pytest.mark.parametrize("ranks", [AxisType.Auto, AxisType.Explicit])
def test_axes_of_both_kinds(ranks):
    """Types show only explicit axes; features over an automatic axis next to them are gathered."""
    other = AxisType.Auto if ranks == AxisType.Explicit else AxisType.Explicit
    mesh = tp_mesh((other, ranks))
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P(AXIS, "tp")))
    results = jax.jit(moves_and_gradients)(x, y, METADATA)
    check_all_ranks(results)
    if other == AxisType.Explicit:
        check_split(results)


def test_two_axes_are_one_axis_of_ranks():
    """The rank counts along `axis_name` in row-major order, whatever their order in the mesh."""
    names = ("data", "pod")
    plan = random_plan(np.random.default_rng(3), 8, S, T)
    x, y = integers(8 * T, F, seed=4), integers(8 * CAPACITY, F, seed=5)
    for kind in AxisType.Auto, AxisType.Explicit:
        mesh = permuted_mesh((2, 4), ("pod", "data"), kind)
        placed = jax.device_put((x, y), NamedSharding(mesh, P(names)))
        run = jax.jit(lambda *args: moves_and_gradients(*args, axis_name=names))
        check_all_ranks(run(*placed, Metadata(**plan)), x, y, plan)


def test_one_device_holds_all_ranks():
    x, y = jax.device_put((X, Y), jax.devices()[1])
    run = jax.jit(moves_and_gradients)
    check_all_ranks(run(x, y, METADATA))
    too_long = Metadata(**{**PLAN, "seq_len": PLAN["seq_len"] + T})
    assert all(np.isnan(result).all() for result in run(x, y, too_long))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_vmap(kind):
    """One plan gives one call with wider rows; a plan per example gives a loop."""
    x, plans = integers(2, W * T, F), [PLAN, random_plan(np.random.default_rng(6), W, S, T, 2)]
    metadata = jax.tree.map(lambda *a: np.stack(a), *(Metadata(**plan) for plan in plans))
    placed = jax.device_put(x, NamedSharding(tp_mesh(kind), P(None, AXIS, "tp")))

    def move(x, metadata):
        return dispatch(x, metadata, axis_name=AXIS, capacity=CAPACITY)

    shared = jax.jit(jax.vmap(move, in_axes=(0, None))).lower(placed, METADATA).compile()
    text = str(shared.as_text())
    assert text.count('custom_call_target="jax_cp_dispatch.dispatch"') == 1
    all_shared = shared(placed, METADATA)
    all_own = jax.jit(jax.vmap(move))(placed, metadata)
    for b, plan in enumerate(plans):
        rows = x[b].reshape(W, T, F)
        got = np.asarray(all_shared)[b].reshape(W, CAPACITY, F)
        np.testing.assert_array_equal(got, dispatched(PLAN, rows, CAPACITY))
        got = np.asarray(all_own)[b].reshape(W, CAPACITY, F)
        np.testing.assert_array_equal(got, dispatched(plan, rows, CAPACITY))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_donated_storage_is_written_in_place(kind):
    """Storage on other devices is first moved to the rows."""
    mesh = tp_mesh(kind)
    x = jax.device_put(X, NamedSharding(mesh, P(AXIS, "tp")))
    places = lambda a: [s.data.unsafe_buffer_pointer() for s in a.addressable_shards]

    def move(x, out):
        return dispatch(x, METADATA, axis_name=AXIS, capacity=CAPACITY, out=out)

    for spec, donated in (P(AXIS, "tp"), 1), (P(AXIS), ()):
        # Created by XLA: a device array that shares memory with NumPy cannot be donated.
        split = NamedSharding(mesh, spec)
        storage = jax.jit(lambda: jnp.full(Y.shape, jnp.nan), out_shardings=split)()
        before = places(storage)
        got = jax.jit(move, donate_argnums=donated)(x, storage)
        expected = dispatched(PLAN, X.reshape(W, T, F), CAPACITY)
        np.testing.assert_array_equal(got, expected.reshape(Y.shape))
        assert axes_of(got) == (AXIS, "tp")
        assert (places(got) == before) == bool(donated)


def test_donated_storage_is_deleted_even_if_the_call_is_rejected():
    mesh = tp_mesh(AxisType.Auto)
    split = NamedSharding(mesh, P(AXIS, "tp"))
    x = jax.device_put(X, split)
    storage = jax.jit(lambda: jnp.zeros(Y.shape), out_shardings=split)()
    counts = PLAN["num_recv_tokens"].copy()
    counts[-1, 0] += 1

    def move(x, counts, out):
        plan = Metadata(**{**PLAN, "num_recv_tokens": counts})
        return dispatch(x, plan, axis_name=AXIS, capacity=CAPACITY, out=out)

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="num_recv_tokens"):
        jax.block_until_ready(jax.jit(move, donate_argnums=2)(x, counts, storage))
    with pytest.raises(ValueError, match="dispatch: out is deleted: it was donated to an earlier"):
        move(x, PLAN["num_recv_tokens"], storage)


# ---- Partly manual meshes: some axes inside a shard_map, others outside.


@pytest.mark.parametrize(
    "kind, check_vma",
    [(AxisType.Auto, True), (AxisType.Explicit, False), (AxisType.Manual, True)],
)
def test_manual_ranks_next_to_another_axis(kind, check_vma):
    """Inside `shard_map` over the ranks, features are sharded over tp: outside or also inside."""
    features = "tp" if kind == AxisType.Manual else None
    mesh = tp_mesh(AxisType.Auto if features else kind)
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P(AXIS, "tp")))
    run = jax.jit(
        jax.shard_map(
            moves_and_gradients,
            mesh=mesh,
            axis_names={AXIS, "tp"} if features else {AXIS},
            in_specs=(P(AXIS, features), P(AXIS, features), P()),
            out_specs=P(AXIS, features),
            check_vma=check_vma,
        )
    )
    with jax.set_mesh(mesh):
        check_all_ranks(run(x, y, METADATA))


@pytest.mark.parametrize("kind, check_vma", [(AxisType.Auto, False), (AxisType.Explicit, True)])
def test_ranks_that_are_not_manual_inside_another_axis(kind, check_vma):
    """Two concurrent plans: one for each index of a manual axis, on all of its ranks."""
    mesh = permuted_mesh((2, W), ("data", AXIS), kind)
    plans = [PLAN, random_plan(np.random.default_rng(6), W, S, T, 2)]
    metadata = jax.tree.map(lambda *a: np.stack(a), *(Metadata(**plan) for plan in plans))
    x, y = integers(2, W * T, F, seed=7), integers(2, W * CAPACITY, F, seed=8)

    def one_group(*args):
        results = moves_and_gradients(*jax.tree.map(lambda a: a[0], args))
        return [result[None] for result in results]

    run = jax.jit(
        jax.shard_map(
            one_group,
            mesh=mesh,
            axis_names={"data"},
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=check_vma,
        )
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put((x, y), NamedSharding(mesh, P("data", AXIS)))
        results = run(*placed, jax.device_put(metadata, NamedSharding(mesh, P("data"))))
    for group, plan in enumerate(plans):
        of_group = [np.asarray(result)[group] for result in results]
        check_all_ranks(of_group, x[group], y[group], plan)


# ---- In control flow and in loops.


def test_branches_and_loops():
    """Both branches of a condition contain calls, and so does a loop of unknown length."""

    def run(x, y, flag, steps):
        send = lambda x: dispatch(x, METADATA, axis_name=AXIS, capacity=CAPACITY)
        combine_rows = lambda y: combine(y, METADATA, axis_name=AXIS, num_tokens=T)
        branch = jax.lax.cond(flag, lambda: 2 * send(x), lambda: send(combine_rows(y)))
        step = lambda carry: (carry[0] - 1, combine_rows(send(carry[1])))
        return branch, jax.lax.while_loop(lambda carry: carry[0] > 0, step, (steps, x))[1]

    inside = jax.shard_map(
        run, mesh=tp_mesh(), in_specs=(P(AXIS), P(AXIS), P(), P()), out_specs=P(AXIS)
    )
    explicit = jax.device_put((X, Y), NamedSharding(tp_mesh(AxisType.Explicit), P(AXIS, "tp")))
    automatic = jax.device_put((X, Y), NamedSharding(tp_mesh(), P(AXIS, "tp")))
    per_rank = lambda a: np.reshape(a, (W, -1, F))
    for fn, placed in (run, automatic), (run, explicit), (inside, automatic):
        compiled = jax.jit(fn)
        for flag, steps in (True, 3), (False, 0):
            branch, loop = compiled(*placed, flag, steps)
            sent = 2 * per_rank(X) if flag else combined(PLAN, per_rank(Y), T)
            np.testing.assert_array_equal(per_rank(branch), dispatched(PLAN, sent, CAPACITY))
            expected = per_rank(X)
            for _ in range(steps):
                expected = combined(PLAN, dispatched(PLAN, expected, CAPACITY), T)
            np.testing.assert_array_equal(per_rank(loop), expected)


def test_gradient_of_a_scan_with_rematerialisation():
    def loss(x):
        @jax.checkpoint
        def step(carry, _):
            y = dispatch(jnp.sin(carry), METADATA, axis_name=AXIS, capacity=CAPACITY)
            return combine(y, METADATA, axis_name=AXIS, num_tokens=T), None

        return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])

    x = X / 8
    num_copies = combined(PLAN, np.ones((W, CAPACITY, 1)), T).reshape(W * T, 1)
    carry, expected = x.astype(np.float64), 1.0
    for _ in range(3):
        expected = expected * num_copies * np.cos(carry)
        carry = num_copies * np.sin(carry)
    for kind in AxisType.Auto, AxisType.Explicit:
        placed = jax.device_put(x, NamedSharding(tp_mesh(kind), P(AXIS, "tp")))
        got = jax.jit(jax.grad(loss))(placed)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)
