"""dispatch and combine on meshes: axes of all types, placed arrays, storage, two calls."""

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
    moves,
    moves_and_gradients,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from movement_oracle import dispatched, random_plan
from on_mesh import AXIS, mesh_of, permuted_mesh

from jax_cp_dispatch import Metadata, dispatch, dispatch_qkv, dispatch_start, exchange_done

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
both_kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
SENT = dispatched(PLAN, X.reshape(W, T, F), CAPACITY).reshape(Y.shape)


def axes_of(array):
    """Returns how an array is sharded, without trailing unsharded dimensions."""
    spec = [entry[0] if isinstance(entry, tuple) else entry for entry in array.sharding.spec]
    return tuple(spec + [None] * (array.ndim - len(spec)))


def send(x, metadata=METADATA, **where):
    given: dict[str, Any] = {"axis_name": AXIS, "capacity": CAPACITY, **where}
    return dispatch(x, metadata, **given)


# ---- Under plain jit, on a shuffled mesh (tp, cp): each index of tp is a separate group.


def tp_mesh(kind: Any = AUTO):
    return permuted_mesh((2, W), ("tp", AXIS), kind)


def check_split(results):
    """Rows are sharded over the ranks; features keep their sharding."""
    for array in results:
        assert axes_of(array) == (AXIS, "tp")


@pytest.mark.parametrize("tp", [AUTO, EXPLICIT])
@pytest.mark.parametrize("ranks", [AUTO, EXPLICIT])
def test_placed_arrays_stay_on_their_devices(tp, ranks):
    """Types show only explicit axes; features over an automatic axis next to them are gathered.

    Metadata is split over the ranks, or a constant.
    """
    split = NamedSharding(tp_mesh((tp, ranks)), P(AXIS, "tp"))
    placed, types = jax.device_put((X, Y), split), []
    metadata = jax.device_put(METADATA, NamedSharding(split.mesh, P(AXIS)))

    @jax.jit
    def run(x, y, metadata=METADATA):
        results = moves_and_gradients(x, y, metadata)
        types.extend(jax.typeof(result) for result in results)
        return results

    arguments = placed if ranks == EXPLICIT else (*placed, metadata)
    compiled = run.lower(*arguments).compile()
    results = compiled(*arguments)
    check_all_ranks(results)
    if (tp, ranks) != (AUTO, EXPLICIT):
        assert "all-gather" not in str(compiled.as_text())
        check_split(results)
    if tp == ranks == EXPLICIT:
        check_split(types)


def test_shardings_that_only_the_compiler_knows():
    """Of NumPy's arrays; also of rows on every device."""
    split = NamedSharding(tp_mesh(), P(AXIS, "tp"))
    results = jax.jit(moves, in_shardings=(split, split, None))(X, Y, METADATA)
    check_all_ranks(results)
    check_split(results)
    whole = NamedSharding(tp_mesh(), P(None, "tp"))
    np.testing.assert_array_equal(jax.jit(send, in_shardings=whole)(X), SENT)


@both_kinds
def test_without_jit(kind):
    mesh = tp_mesh(kind)
    x = jax.device_put(X, NamedSharding(mesh, P(AXIS, "tp")))
    sent = send(x)
    check_split([sent])
    np.testing.assert_array_equal(sent, SENT)
    np.testing.assert_array_equal(send(jnp.asarray(X), mesh=mesh), SENT)


@pytest.mark.parametrize("kind", [EXPLICIT, AxisType.Manual])
def test_two_axes_are_one_axis_of_ranks(kind):
    """The rank counts along `axis_name` in row-major order, whatever their order in the mesh."""
    names = ("data", "pod")
    plan = random_plan(np.random.default_rng(3), 8, S, T)
    x, y = integers(8 * T, F, seed=4), integers(8 * CAPACITY, F, seed=5)
    is_manual = kind == AxisType.Manual
    mesh = permuted_mesh((2, 4), ("pod", "data"), AUTO if is_manual else kind)
    placed = jax.device_put((x, y), NamedSharding(mesh, P(names)))
    run: Any = lambda *args: moves(*args, axis_name=names)
    if is_manual:
        run = jax.shard_map(run, mesh=mesh, in_specs=P(names), out_specs=P(names))
    check_all_ranks(jax.jit(run)(*placed, Metadata(**plan)), x, y, plan)


def test_one_device_holds_all_ranks():
    x, y = jax.device_put((X, Y), jax.devices()[1])
    run = jax.jit(moves)
    check_all_ranks(run(x, y, METADATA))
    too_long = Metadata(**{**PLAN, "seq_len": PLAN["seq_len"] + T})
    assert all(np.isnan(result).all() for result in run(x, y, too_long))


# ---- Storage. A device array that shares memory with NumPy cannot be donated: XLA creates it.


def places(tree):
    return [
        shard.data.unsafe_buffer_pointer()
        for array in jax.tree.leaves(tree)
        for shard in array.addressable_shards
    ]


def storage_like(shape, sharding):
    return jax.jit(lambda: jnp.full(shape, jnp.nan), out_shardings=sharding)()


@both_kinds
def test_donated_storage_is_written_in_place(kind):
    """Storage on other devices is first moved to the rows."""
    mesh = tp_mesh(kind)
    x = jax.device_put(X, NamedSharding(mesh, P(AXIS, "tp")))
    into = lambda x, out: send(x, out=out)
    for spec, donated in (P(AXIS, "tp"), 1), (P(AXIS), ()):
        storage = storage_like(Y.shape, NamedSharding(mesh, spec))
        before = places(storage)
        got = jax.jit(into, donate_argnums=donated)(x, storage)
        np.testing.assert_array_equal(got, SENT)
        assert axes_of(got) == (AXIS, "tp")
        assert (places(got) == before) == bool(donated)


def test_donated_storage_of_queries_and_keys_is_written_on_each_rank():
    split = NamedSharding(mesh_of(W), P(AXIS))
    storage = [storage_like(Y.shape, split) for _ in range(2)]
    before = places(storage)

    def move(x, metadata, q_out, kv_out):
        options = {"axis_name": AXIS, "q_capacity": CAPACITY, "kv_capacity": CAPACITY}
        return dispatch_qkv(x, 2 * x, metadata, metadata, **options, q_out=q_out, kv_out=kv_out)

    run = jax.shard_map(move, mesh=split.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    got = jax.jit(run, donate_argnums=(2, 3))(X, METADATA, *storage)
    np.testing.assert_array_equal(got, [SENT, 2 * SENT])
    assert places(got) == before


def test_donated_storage_is_deleted_even_if_the_call_is_rejected():
    split = NamedSharding(tp_mesh(), P(AXIS, "tp"))
    x = jax.device_put(X, split)
    storage = storage_like(Y.shape, split)
    counts = PLAN["num_recv_tokens"].copy()
    counts[-1, 0] += 1

    def move(x, counts, out):
        return send(x, Metadata(**{**PLAN, "num_recv_tokens": counts}), out=out)

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="num_recv_tokens"):
        jax.block_until_ready(jax.jit(move, donate_argnums=2)(x, counts, storage))
    with pytest.raises(ValueError, match="dispatch: out is deleted: it was donated to an earlier"):
        move(x, PLAN["num_recv_tokens"], storage)


# ---- An exchange in two calls, which on CPU devices are one; on GPUs: test_gpu_lowering.py.


SIZES: Any = {"axis_name": AXIS, "capacity": CAPACITY}


def on_ranks(fn):
    return jax.shard_map(fn, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))


def in_two_calls(arrays, metadata):
    exchange, beside = dispatch_start(arrays, metadata, **SIZES, beside={"y": arrays["x"]})
    there, beside = exchange_done(exchange, beside=beside)
    return there, beside["y"]


def in_one_call(arrays, metadata):
    there = dispatch(arrays, metadata, **SIZES)
    return there, arrays["x"]


def test_arrays_of_all_kinds_are_those_of_one_call():
    """Integers, arrays without elements, and 8-bit floats, whose adjoint is one exchange.

    Mapped over examples of one plan.
    """

    def total(x, metadata, move):
        narrow = x.astype("float8_e4m3fn")
        arrays = {"ids": jnp.arange(T), "none": jnp.zeros((T, 0)), "x": x, "narrow": narrow}
        there, beside = move(arrays, metadata)
        squares = lambda x: (x.astype(jnp.float32) ** 2).sum()
        value = squares(there["x"]) + squares(there["narrow"]) + squares(beside)
        return jax.lax.psum(value, AXIS), there

    def both(move):
        grad = jax.grad(lambda x, m: total(x, m, move), has_aux=True)
        run = jax.shard_map(
            jax.vmap(grad, (0, None)), mesh=mesh_of(W), in_specs=(P(None, AXIS), P(AXIS)),
            out_specs=P(None, AXIS),
        )  # fmt: skip
        return jax.jit(run)(np.stack([X, X / 2]), METADATA)

    (two, there), (one, _) = both(in_two_calls), both(in_one_call)
    np.testing.assert_array_equal(two, one)
    ids = dispatched(PLAN, np.tile(np.arange(T), (W, 1)), CAPACITY)
    np.testing.assert_array_equal(there["ids"], [ids.reshape(-1)] * 2)
    sent = dispatched(PLAN, X.reshape(W, T, F), CAPACITY).reshape(-1, F)
    np.testing.assert_array_equal(there["x"], [sent, sent / 2])
    assert there["none"].shape == (2, W * CAPACITY, 0)


def test_an_exchange_ends_once():
    def twice(x, metadata):
        exchange, _ = dispatch_start(x, metadata, **SIZES)
        exchange_done(exchange)
        return exchange_done(exchange)[0]

    with pytest.raises(ValueError, match=r"exchange_done: this exchange of dispatch_start is done"):
        jax.eval_shape(lambda x: on_ranks(twice)(x, METADATA), X)
    with pytest.raises(TypeError, match=r"exchange_done: got tuple; it needs the first result of"):
        exchange_done((X, None))
