"""Overlapped 8-bit GEMMs and their derivatives: all methods in all scaling modes.

Also uneven tokens, and the state of delayed scaling from step to step."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_matmul_oracle as oracle
from comm_gemm_cases import methods, with_nan_behind
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of, on_ranks
from scaled_gemm_cases import E4M3, E5M2, MXFP8, near
from scaled_matmul_cases import (
    CURRENT,
    DELAYED,
    GATHER,
    ORACLES,
    SCALES,
    SCATTER,
    N,
    check,
    check_state,
    of,
    run_all,
    state_of,
    value_and_gradients,
)

from jax_cp_dispatch.scaling import MatmulScaling


@pytest.mark.parametrize(
    "op, mode",
    [(GATHER, CURRENT), (GATHER, MXFP8), (SCATTER, CURRENT), (SCATTER, DELAYED)],
)
def test_every_method(op, mode):
    """Values and derivatives for several batches on a permuted mesh."""
    p = 4
    names = [
        name
        for name in methods(op, p)
        if name not in ("pipeline of 1", "pipeline of more than columns")
    ]
    names = ("ring", "xla") if mode == DELAYED else names  # other methods differ as in CURRENT
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


def test_types_of_results():
    """bfloat16 in and out; a gradient has the type of its operand."""
    p, bf16 = 2, jnp.bfloat16
    x, w, dy, bias = (jnp.asarray(a, bf16) for a in of(SCATTER, p, (), 3))
    w = w.astype(jnp.float32)
    options: Any = {"scaling_mode": MXFP8, "preferred_element_type": bf16}
    local = partial(value_and_gradients, partial(SCATTER, axis_name=AXIS, **options))
    got: Any = on_ranks(local, mesh_of(p))(x, w, bias, dy)
    assert [a.dtype for a in got[:4]] == [bf16, bf16, jnp.float32, bf16]
    x, w, dy, bias = (np.asarray(a, np.float32) for a in (x, w, dy, bias))
    check(got, oracle.matmul_reduce_scatter(x, w, dy, MXFP8, bias=bias), "bfloat16")


# ---- Programs.


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


def test_no_tokens():
    """Without tokens there is nothing to quantize."""
    p = 2
    x, w, dy, bias = of(GATHER, p, (), 0)
    results = run_all(GATHER, mesh_of(p), DELAYED, x, w, bias, dy, names=("ring",))
    y, dx, dw, dbias, after = results["ring"]
    assert y.shape == (p, 0, N) and dx.shape == x.shape
    assert not np.any(dw) and not np.any(dbias)
    check_state(after, {"x": x, "w": w, "dy": dy})
