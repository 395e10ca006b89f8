"""Overlapped products of 8 bits and their derivatives: all methods in all scaling modes, uneven
tokens, meshes, global arrays, and the state of delayed scaling from step to step."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_matmul_oracle as oracle
from comm_gemm_cases import methods, normal, run_once, with_nan_behind
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh
from scaled_gemm_cases import E4M3, E5M2, MODES, MXFP8, near

from jax_cp_dispatch.comm_gemm import (
    DelayedScaling,
    MatmulScaling,
    all_gather_matmul,
    create_comm_overlap_buffer,
    matmul_reduce_scatter,
)

DELAYED, CURRENT, _ = MODES
GATHER, SCATTER = all_gather_matmul, matmul_reduce_scatter
ORACLES = {GATHER: oracle.all_gather_matmul, SCATTER: oracle.matmul_reduce_scatter}
K, N = 64, 32
SCALES = {"x": np.float32(77.5), "w": np.float32(1.5), "dy": np.float32(3000)}


def of(op, num_ranks, batch, tokens) -> list[Any]:
    """x, w, dy and bias per rank; every rank's of another size."""
    p, gathers = num_ranks, op is GATHER
    each = np.float32(2) ** (np.arange(p) % 3)
    sized = lambda seed, *shape: np.einsum("r...,r->r...", normal(seed, p, *shape), each)
    rows_in, rows_out = (tokens, p * tokens) if gathers else (p * tokens, tokens)
    x, dy = sized(0, *batch, rows_in, K), sized(2, *batch, rows_out, N)
    bias = sized(3, N) if gathers else np.stack([normal(3, N)] * p)
    return [x, sized(1, K, N), dy, bias]


def state_of(scales=SCALES):
    """With a history: the largest of x comes next, that of w is the newest, dy has none."""
    zeros = np.zeros(1024, np.float32)
    histories = {"x": zeros.copy(), "w": zeros.copy(), "dy": zeros.copy()}
    histories["x"][:3], histories["w"][0] = (0.5, 100, np.inf), 1e-3
    each = {
        name: DelayedScaling(amax_history=jnp.asarray(histories[name]), scale=jnp.asarray([scale]))
        for name, scale in scales.items()
    }
    return MatmulScaling(**each), histories


def value_and_gradients(fn, x, w, bias, dy, state=None) -> Any:
    """(y, dx, dw, dbias, next state or None)"""
    call = lambda x, w, bias, state: fn(x, w, bias=bias, scaling_state=state)
    y, pull = jax.vjp(call, x, w, bias, state)
    return (y, *pull(dy))


def check(got, want, name):
    for part, one, expected in zip(("y", "dx", "dw", "dbias"), got, want, strict=False):
        near(one, expected, f"{name}, {part}")


def check_state(state, arrays):
    """After a step with x, w and dy, of all ranks."""
    _, histories = state_of()
    for name, x in arrays.items():
        kind = E5M2 if name == "dy" else E4M3
        history = np.where(np.isfinite(histories[name]), histories[name], 0)
        _, scale = oracle.next_state(history, SCALES[name], x, kind)
        entry: Any = getattr(state, name)
        want = np.concatenate([[oracle.largest(x)], histories[name][:-1]])
        shape = np.shape(entry.amax_history)
        np.testing.assert_array_equal(entry.amax_history, np.broadcast_to(want, shape))
        np.testing.assert_array_equal(entry.scale, np.full(np.shape(entry.scale), scale))


# ---- All methods.


def run_all(op, mesh, mode, x, w, bias, dy, *, names=None, counts=None, check_vma=True):
    """Results of every method, or of those named, in one program."""
    each = methods(op, mesh.size)
    state = state_of()[0] if mode == DELAYED else None

    def local(x, w, bias, dy):
        return {
            name: value_and_gradients(
                partial(fn, axis_name=AXIS, scaling_mode=mode, row_counts=counts),
                *(x, w, bias, dy, state),
            )
            for name, fn in each.items()
            if names is None or name in names
        }

    return run_once(on_ranks(local, mesh, check_vma=check_vma), x, w, bias, dy)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_every_method(op, mode):
    """Values and derivatives of several batches on a permuted mesh."""
    p = 4
    names = [
        name
        for name in methods(op, p)
        if name not in ("pipeline of 1", "pipeline of more than columns")
    ]
    names = ("ring", "xla") if mode == DELAYED else names  # the others differ as in CURRENT
    x, w, dy, bias = of(op, p, (2,), 3)
    scales = SCALES if mode == DELAYED else None
    want = ORACLES[op](x, w, dy, mode, scales=scales, bias=bias)
    results = run_all(op, mesh_of(p, (2, 0, 3, 1)), mode, x, w, bias, dy, names=names)
    for name, got in results.items():
        check(got, want, name)
        if mode == DELAYED:
            check_state(got[-1], {"x": x, "w": w, "dy": dy})


@pytest.mark.parametrize(
    "num_ranks, mode, op, name",
    [
        (1, CURRENT, SCATTER, "pipeline of 3"),
        (1, MXFP8, GATHER, "ring"),
        (8, DELAYED, SCATTER, "ring, atomic"),
    ],
)
def test_numbers_of_ranks(num_ranks, mode, op, name):
    x, w, dy, bias = of(op, num_ranks, (), 2)
    scales = SCALES if mode == DELAYED else None
    want = ORACLES[op](x, w, dy, mode, scales=scales, bias=bias)
    results = run_all(op, mesh_of(num_ranks), mode, x, w, bias, dy, names=(name,))
    check(results[name], want, name)


@pytest.mark.parametrize(
    "op, mode",
    [(GATHER, DELAYED), (GATHER, CURRENT), (GATHER, MXFP8), (SCATTER, DELAYED)],
)
def test_uneven_tokens(op, mode):
    """What stands behind a rank's own tokens, of x or of dy, reaches no value, scale or state."""
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
    moved[1] = 1e6  # that rank has no tokens
    x, dy = (moved, dy) if gathers else (x, moved)
    names = ("ring, no copies", "xla") if mode == MXFP8 else ("ring", "pipeline of 3")
    options: Any = {"names": names, "counts": counts, "check_vma": False}
    for name, got in run_all(op, mesh_of(p), mode, x, w, bias, dy, **options).items():
        check(got, want, name)
        if mode == DELAYED:
            check_state(got[-1], dict(zip(("x", "w", "dy"), real, strict=True)))


def test_nan_on_one_rank_keeps_the_scale_of_all():
    """It comes into the history, as the largest of all ranks."""
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


def test_types_of_results():
    """bfloat16 in and out; a gradient has its operand's type."""
    p, bf16 = 2, jnp.bfloat16
    x, w, dy, bias = (jnp.asarray(a, bf16) for a in of(SCATTER, p, (), 3))
    w = w.astype(jnp.float32)
    options: Any = {"scaling_mode": MXFP8, "preferred_element_type": bf16}
    local = partial(value_and_gradients, partial(SCATTER, axis_name=AXIS, **options))
    got: Any = run_once(on_ranks(local, mesh_of(p)), x, w, bias, dy)
    assert [a.dtype for a in got[:4]] == [bf16, bf16, jnp.float32, bf16]
    x, w, dy, bias = (np.asarray(a, np.float32) for a in (x, w, dy, bias))
    check(got, oracle.matmul_reduce_scatter(x, w, dy, MXFP8, bias=bias), "bfloat16")


# ---- Meshes and places.


@pytest.mark.parametrize("op, mode", [(GATHER, CURRENT), (SCATTER, DELAYED)])
def test_groups_share_a_state_but_no_scale(op, mode):
    """Two groups of four ranks: current scales are a group's, a delayed state is of them all."""
    p, groups, names = 4, 2, ("data", "tp")
    state = state_of()[0] if mode == DELAYED else None
    sizes = 1, 3, 4, 5  # of the second group
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
    got, after = run_once(jax.jit(mapped), x, w, bias, dy)
    for group, operands in enumerate(of_groups):
        scales = SCALES if mode == DELAYED else None
        x_of, w_of, dy_of, bias_of = operands
        want = ORACLES[op](x_of, w_of, dy_of, mode, scales=scales, bias=bias_of)
        check([a[group * p : (group + 1) * p] for a in got], want, group)
    if mode == DELAYED:
        check_state(after, {"x": x, "w": w, "dy": dy})


@pytest.mark.parametrize("mode", [DELAYED, CURRENT])
def test_arrays_that_another_axis_does_not_split(mode):
    """The result and the next state are the same on all of its ranks, and known to be."""
    p, names = 4, ("data", "tp")
    x, w, dy, _ = of(GATHER, p, (), 2)
    spec = P("tp")
    state: Any = {"scaling_state": state_of()[0]} if mode == DELAYED else {}
    call = partial(GATHER, axis_name="tp", method="ring", scaling_mode=mode, **state)
    mapped = jax.shard_map(
        lambda x, w: call(x[0], w[0])[None],
        mesh=permuted_mesh((2, p), names),
        in_specs=spec,
        out_specs=spec,
    )
    scales = SCALES if mode == DELAYED else None
    want = oracle.all_gather_matmul(x, w, dy, mode, scales=scales)[0]
    near(run_once(jax.jit(mapped), x, w), want)


def test_registered_buffers_of_8_bits():
    """Of either operand's type; the derivative of a sum gathers 8 bits without one."""
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

    gathered, summed = run_once(on_ranks(local, mesh_of(p)), *arrays)
    wants = [
        ORACLES[op](x, w, dy, CURRENT, bias=bias)
        for (op, _), (x, w, dy, bias) in zip(calls, arrays, strict=True)
    ]
    check(gathered, wants[0], "gather")
    check(summed[1:], wants[1][1:], "scatter")  # dx, dw, dbias; y of rounded parts
    off = np.abs(np.asarray(summed[0]) - wants[1][0]).max() / np.abs(wants[1][0]).max()
    assert 1e-5 < off < p * 2**-8


@pytest.mark.parametrize(
    "kind, mode", [*((AxisType.Auto, mode) for mode in MODES), (AxisType.Explicit, DELAYED)]
)
def test_global_arrays(kind, mode):
    """Under plain jit: as on ranks, of a batch that is split over another axis."""
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
    got = run_once(run, *operands)
    scales = SCALES if mode == DELAYED else None
    # A current scale of x is that of a group of ranks, which has a part of the batch.
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


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_global_sums(kind):
    """Tokens that do not divide, where axes are automatic; another axis splits nothing."""
    p, mode = 4, DELAYED
    mesh = permuted_mesh((2, p), ("dp", "tp"), kind)
    rows = 7 if kind == AxisType.Auto else 8
    x, w, dy, bias = of(SCATTER, p, (), 2)
    counts = (2, 2, 2, rows - 6)
    x, dy = x[:, :rows], oracle.real(dy, counts)
    want = oracle.matmul_reduce_scatter(x, w, dy, mode, counts, SCALES, bias)
    flat = lambda a: a.reshape(-1, a.shape[-1])[:rows]
    whole = np.concatenate(list(x), axis=-1), np.concatenate(list(w)), bias[0], flat(dy)
    call = partial(SCATTER, axis_name="tp", method="ring", scaling_mode=mode, mesh=mesh)
    state = state_of()[0]
    run = jax.jit(lambda x, w, bias, dy: value_and_gradients(call, x, w, bias, dy, state))
    of_dy = P() if kind == AxisType.Auto else P("tp")  # explicit axes are part of the type
    specs = P(), P(), P(), of_dy
    on_mesh = [jax.device_put(a, NamedSharding(mesh, b)) for a, b in zip(whole, specs, strict=True)]
    y, dx, dw, dbias, after = run_once(run, *on_mesh)
    near(y, flat(want[0]))
    near(dx, np.concatenate(list(want[1]), axis=-1))
    near(dw, np.concatenate(list(want[2])))
    near(dbias, want[3].sum(0))
    check_state(after, {"x": x, "w": w, "dy": dy})


# ---- Programs.


def test_training_with_delayed_scaling():
    """The gradient by the state takes its place in the next step; nothing is left of the first."""
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

    after, (y, *scales) = run_once(on_ranks(local, mesh_of(p)), x, w, dy)
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


def test_inside_of_other_transformations():
    """vmap with scales per example, and a layer that is computed again for its derivative."""
    p, examples = 2, 2
    arrays = [[a * np.float32(1 + 4 * i) for a in of(GATHER, p, (), 2)] for i in range(examples)]
    x, w, dy, _ = (np.stack(a, axis=1) for a in zip(*arrays, strict=True))

    def local(x, w, dy):
        call = partial(GATHER, axis_name=AXIS, method="ring", scaling_mode=CURRENT)
        y, pull = jax.vjp(jax.checkpoint(call), x[0], w[0])
        return jax.vmap(call)(x, w), y, pull(dy[0])

    mapped, y, (dx, dw) = run_once(on_ranks(local, mesh_of(p)), x, w, dy)
    wants = [oracle.all_gather_matmul(x, w, dy, CURRENT) for x, w, dy, _ in arrays]
    for i in range(examples):
        near(mapped[:, i], wants[i][0], i)
    check((y, dx, dw), wants[0], "checkpoint")


def test_nothing_to_multiply():
    """No tokens: nothing to round either."""
    p = 2
    x, w, dy, bias = of(GATHER, p, (), 0)
    results = run_all(GATHER, mesh_of(p), DELAYED, x, w, bias, dy, names=("ring",))
    y, dx, dw, dbias, after = results["ring"]
    assert y.shape == (p, 0, N) and dx.shape == x.shape
    assert not np.any(dw) and not np.any(dbias)
    check_state(after, {"x": x, "w": w, "dy": dy})


def test_blocks_of_global_arrays_are_those_of_a_rank():
    """16 elements of 64 are no block; refused where it is traced, forward and backward."""
    mesh = mesh_of(4)
    call = {"axis_name": AXIS, "scaling_mode": MXFP8, "mesh": mesh}
    x, w = jnp.ones((8, 64)), jnp.ones((64, 64))
    match = "16 elements are contracted on a rank, forward or in the derivative"
    with pytest.raises(ValueError, match=f"matmul_reduce_scatter: {match}"):
        jax.jit(partial(matmul_reduce_scatter, **call)).trace(x, w)
    loss = lambda x, w: all_gather_matmul(x, w, **call).sum()
    with pytest.raises(ValueError, match=f"all_gather_matmul: {match}"):
        jax.jit(jax.grad(loss)).trace(x, w)
