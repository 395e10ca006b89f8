"""Overlapped 8-bit GEMMs and their derivatives: methods, uneven tokens, states, meshes, buffers."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import scaled_matmul_oracle as oracle
from comm_gemm_cases import methods, with_nan_behind
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh
from scaled_gemm_cases import E4M3, E5M2, MXFP8, near
from scaled_matmul_cases import (
    CURRENT,
    DELAYED,
    GATHER,
    ORACLES,
    SCALES,
    SCATTER,
    K,
    N,
    check,
    check_state,
    of,
    run_all,
    state_of,
    value_and_gradients,
)

from jax_cp_dispatch.buffers import create_comm_overlap_buffer
from jax_cp_dispatch.scaling import MatmulScaling


@pytest.mark.parametrize(
    "op, mode, num_ranks",
    [
        (GATHER, MXFP8, 4),
        (SCATTER, CURRENT, 4),
        (GATHER, CURRENT, 2),
        (SCATTER, DELAYED, 8),
        (SCATTER, CURRENT, 1),
    ],
)
def test_every_method(op, mode, num_ranks):
    """Values and derivatives for several batches on a permuted mesh.

    Every method on 4 ranks; methods differ in other modes as in one.
    """
    p = num_ranks
    names = [
        name
        for name in methods(op, p)
        if name not in ("pipeline of 1", "pipeline of more than columns")
    ]
    names = names if p == 4 else ("ring", "ring, atomic", "pipeline of 3", "xla")
    x, w, dy, bias = of(op, p, (2,), 3)
    scales = SCALES if mode == DELAYED else None
    want = ORACLES[op](x, w, dy, mode, scales=scales, bias=bias)
    results = run_all(op, mesh_of(p, [p - 1, *range(p - 1)]), mode, x, w, bias, dy, names=names)
    for name, got in results.items():
        check(got, want, name)
        if mode == DELAYED:
            check_state(got[-1], {"x": x, "w": w, "dy": dy})


@pytest.mark.parametrize(
    "op, mode",
    [(GATHER, DELAYED), (GATHER, MXFP8), (SCATTER, DELAYED)],
)
def test_uneven_tokens(op, mode):
    """Rows after a rank's own tokens, in x or dy, reach no value, scale or state."""
    p, counts = 3, (2, 0, 4)
    x, w, dy, bias = of(op, p, (2,), 2)
    gathers = op is GATHER
    rows = [max(counts), sum(counts)]
    x, dy = (np.resize(a, (*a.shape[:-2], n, a.shape[-1]))
             for a, n in zip((x, dy), rows if gathers else rows[::-1], strict=True))  # fmt: skip
    scales = SCALES if mode == DELAYED else None
    want = ORACLES[op](x, w, dy, mode, counts, scales, bias)
    real = [oracle.real(x, counts), w, dy] if gathers else [x, w, oracle.real(dy, counts)]
    moved = with_nan_behind(x if gathers else dy, counts)
    moved[1] = 1e6  # this rank has no tokens
    x, dy = (moved, dy) if gathers else (x, moved)
    names = ("ring, no copies", "xla") if mode == MXFP8 else ("ring", "pipeline of 3")
    options: Any = {"names": names, "counts": counts, "check_vma": False}
    for name, got in run_all(op, mesh_of(p), mode, x, w, bias, dy, **options).items():
        check(got, want, name)
        if mode == DELAYED:
            check_state(got[-1], dict(zip(("x", "w", "dy"), real, strict=True)))


def test_nan_on_one_rank_keeps_the_scale_of_all_ranks():
    """NaN enters the history, as the largest magnitude of all ranks."""
    p, state = 4, state_of()[0]
    call = partial(GATHER, axis_name=AXIS, method="none", scaling_mode=DELAYED)
    local = lambda x, w, bias, dy: value_and_gradients(call, x, w, bias, dy, state)[-1]
    x, w, dy, bias = of(GATHER, p, (), 2)
    run = on_ranks(local, mesh_of(p)).lower(x, w, bias, dy).compile()
    for name, array in (("x", x), ("w", w), ("dy", dy)):
        kept, array[2, 0, 1] = array[2, 0, 1], np.nan
        after: Any = getattr(run(x, w, bias, dy), name)
        array[2, 0, 1] = kept
        np.testing.assert_array_equal(after.amax_history[:, 0], [np.nan] * p)
        np.testing.assert_array_equal(after.scale, np.full((p, 1), SCALES[name]))


def test_training_with_delayed_scaling():
    """The gradient with respect to the state replaces it in the next step."""
    p = 2
    x, w, dy, _ = of(GATHER, p, (), 3)
    factors: Any = np.array([1, 0, 30, 0.5], np.float32)

    def local(x, w, dy):
        call = partial(GATHER, axis_name=AXIS, method="ring", scaling_mode=DELAYED)

        def step(state, factor):
            run = lambda state: call(x * factor, w, scaling_state=state)
            y, pull = jax.vjp(run, state)
            (after,) = pull(dy * factor)
            return after, (y, after.x.scale, after.w.scale, after.dy.scale)

        return jax.lax.scan(step, MatmulScaling.init(), factors)

    after, (y, *scales) = on_ranks(local, mesh_of(p))(x, w, dy)
    used = dict.fromkeys(("x", "w", "dy"), np.float32(1))
    history = {name: np.zeros(1024, np.float32) for name in used}
    for i, factor in enumerate(factors):
        want = oracle.all_gather_matmul(x * factor, w, dy, DELAYED, scales=used)[0]
        near(y[:, i], want, i)
        arrays: Any = {"x": (x * factor, E4M3), "w": (w, E4M3), "dy": (dy * factor, E5M2)}
        for (name, (array, kind)), scale in zip(arrays.items(), scales, strict=True):
            history[name], used[name] = oracle.next_state(history[name], used[name], array, kind)
            np.testing.assert_array_equal(scale[:, i], np.full((p, 1), used[name]))
    np.testing.assert_array_equal(after.x.amax_history, np.stack([history["x"]] * p))


def test_under_other_transformations():
    """vmap with scales per example, and a layer that is recomputed for its derivative."""
    p, examples = 2, 2
    arrays = [[a * np.float32(1 + 4 * i) for a in of(GATHER, p, (), 2)] for i in range(examples)]
    x, w, dy, _ = (np.stack(a, axis=1) for a in zip(*arrays, strict=True))

    def local(x, w, dy):
        call = partial(GATHER, axis_name=AXIS, method="ring", scaling_mode=CURRENT)
        y, pull = jax.vjp(jax.checkpoint(call), x[0], w[0])
        return jax.vmap(call)(x, w), y, pull(dy[0])

    mapped, y, (dx, dw) = on_ranks(local, mesh_of(p))(x, w, dy)
    wants = [oracle.all_gather_matmul(x, w, dy, CURRENT) for x, w, dy, _ in arrays]
    for i in range(examples):
        near(mapped[:, i], wants[i][0], i)
    check((y, dx, dw), wants[0], "checkpoint")


# ---- Places.


@pytest.mark.parametrize("op, mode", [(GATHER, CURRENT), (SCATTER, DELAYED)])
def test_groups_share_a_state_but_no_current_scale(op, mode):
    """Two groups of four ranks: each has its own current scale; both share a delayed state."""
    p, groups, names = 4, 2, ("data", "tp")
    state = state_of()[0] if mode == DELAYED else None
    sizes = 1, 3, 4, 5  # in the second group
    of_groups = [of(op, p, (), 2)]
    of_groups.append([a * np.float32(size) for a, size in zip(of_groups[0], sizes, strict=True)])
    arrays: list[Any] = [np.concatenate(each) for each in zip(*of_groups, strict=True)]
    x, w, dy, bias = arrays
    call = partial(op, axis_name="tp", method="ring", scaling_mode=mode)

    def local(x, w, bias, dy):
        *got, after = value_and_gradients(call, x[0], w[0], bias[0], dy[0], state)
        return [a[None] for a in got], after

    spec = P(names)
    mesh = permuted_mesh((groups, p), names)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, P()))
    got, after = jax.jit(mapped)(x, w, bias, dy)
    for group, operands in enumerate(of_groups):
        scales = SCALES if mode == DELAYED else None
        x_of, w_of, dy_of, bias_of = operands
        want = ORACLES[op](x_of, w_of, dy_of, mode, scales=scales, bias=bias_of)
        check([a[group * p : (group + 1) * p] for a in got], want, group)
    if mode == DELAYED:
        check_state(after, {"x": x, "w": w, "dy": dy})


def test_arrays_replicated_over_another_axis():
    """The result and the next state are equal on all of its ranks, as JAX's types show."""
    p, names, mode = 4, ("data", "tp"), DELAYED
    x, w, dy, _ = of(GATHER, p, (), 2)
    spec = P("tp")
    state: Any = {"scaling_state": state_of()[0]}
    call = partial(GATHER, axis_name="tp", method="ring", scaling_mode=mode, **state)
    mapped = jax.shard_map(
        lambda x, w: call(x[0], w[0])[None],
        mesh=permuted_mesh((2, p), names),
        in_specs=spec,
        out_specs=spec,
    )
    want = oracle.all_gather_matmul(x, w, dy, mode, scales=SCALES)[0]
    near(jax.jit(mapped)(x, w), want)


def test_registered_buffers_of_8_bits():
    """Buffers of either operand's type; the derivative of a sum gathers 8 bits without one."""
    p = 4
    gathers = create_comm_overlap_buffer("AG", "RING_EXCHANGE", (p * 3, K), E4M3, p)
    scatters = create_comm_overlap_buffer("RS", "PIPELINE", (p * 3, N), "bfloat16", p)
    calls = ((GATHER, gathers), (SCATTER, scatters))
    arrays = [of(op, p, (), 3) for op, _ in calls]

    def local(*arrays):
        return [
            value_and_gradients(
                partial(op, axis_name=AXIS, buffer=buffer, scaling_mode=CURRENT), x, w, bias, dy
            )
            for (op, buffer), (x, w, dy, bias) in zip(calls, arrays, strict=True)
        ]

    gathered, summed = on_ranks(local, mesh_of(p))(*arrays)
    wants = [
        ORACLES[op](x, w, dy, CURRENT, bias=bias)
        for (op, _), (x, w, dy, bias) in zip(calls, arrays, strict=True)
    ]
    check(gathered, wants[0], "gather")
    check(summed[1:], wants[1][1:], "scatter")  # dx, dw, dbias; y from rounded parts
    off = np.abs(np.asarray(summed[0]) - wants[1][0]).max() / np.abs(wants[1][0]).max()
    assert 1e-5 < off < p * 2**-8


@pytest.mark.parametrize("kind, mode", [(AxisType.Auto, CURRENT), (AxisType.Explicit, DELAYED)])
def test_global_arrays(kind, mode):
    """Under plain jit: the same as on ranks, with a batch sharded over another axis."""
    dp, p, B, S = 2, 4, 2, 8
    mesh = permuted_mesh((dp, p), ("dp", "tp"), kind)
    per_rank = of(GATHER, p, (B,), S // p)
    x, w, dy, bias = (np.concatenate(list(a), axis=axis)
                      for a, axis in zip(per_rank, (-2, 1, -1, 0), strict=True))  # fmt: skip
    specs = P("dp", "tp"), P(None, "tp"), P("tp"), P("dp", None, "tp")
    state = state_of()[0] if mode == DELAYED else None
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    operands: Any = [place(a, spec) for a, spec in zip((x, w, bias, dy), specs, strict=True)]
    call = partial(GATHER, axis_name="tp", method="ring", scaling_mode=mode, mesh=mesh)
    run = jax.jit(lambda x, w, bias, dy: value_and_gradients(call, x, w, bias, dy, state))
    got = run(*operands)
    scales = SCALES if mode == DELAYED else None
    # A current scale of x belongs to a group of ranks, which has a part of the batch.
    parts = [per_rank] if mode != CURRENT else [
        tuple(a[:, i : i + 1] if a.ndim == 4 else a for a in per_rank) for i in range(dp)
    ]  # fmt: skip
    wants = [
        oracle.all_gather_matmul(x, w, dy, mode, scales=scales, bias=bias)
        for x, w, dy, bias in parts
    ]
    y, dx, dw, dbias = zip(*wants, strict=True)
    near(got[0], np.concatenate(list(np.concatenate(y, axis=1)), axis=-1))
    near(got[1], np.concatenate(list(np.concatenate(dx, axis=1)), axis=-2))
    near(got[2], np.concatenate(list(np.sum(dw, axis=0)), axis=-1))
    near(got[3], np.sum(dbias, axis=0).ravel())
    if mode == DELAYED:
        check_state(got[-1], {"x": x, "w": w, "dy": dy})


def test_global_sums():
    """Tokens that do not divide, with automatic axes; another axis shards nothing."""
    p, mode, rows = 4, DELAYED, 7
    mesh = permuted_mesh((2, p), ("dp", "tp"))
    x, w, dy, bias = of(SCATTER, p, (), 2)
    counts = (2, 2, 2, rows - 6)
    x, dy = x[:, :rows], oracle.real(dy, counts)
    want = oracle.matmul_reduce_scatter(x, w, dy, mode, counts, SCALES, bias)
    flat = lambda a: a.reshape(-1, a.shape[-1])[:rows]
    whole = np.concatenate(list(x), axis=-1), np.concatenate(list(w)), bias[0], flat(dy)
    call = partial(SCATTER, axis_name="tp", method="ring", scaling_mode=mode, mesh=mesh)
    state = state_of()[0]
    run = jax.jit(lambda x, w, bias, dy: value_and_gradients(call, x, w, bias, dy, state))
    on_mesh = [jax.device_put(a, NamedSharding(mesh, P())) for a in whole]
    y, dx, dw, dbias, after = run(*on_mesh)
    near(y, flat(want[0]))
    near(dx, np.concatenate(list(want[1]), axis=-1))
    near(dw, np.concatenate(list(want[2])))
    near(dbias, want[3].sum(0))
    check_state(after, {"x": x, "w": w, "dy": dy})
