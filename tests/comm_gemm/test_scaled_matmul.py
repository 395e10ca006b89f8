"""Overlapped 8-bit GEMMs and their derivatives: methods, uneven tokens, states, meshes, buffers."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import scaled_matmul_oracle as oracle
from comm_gemm_cases import with_nan_behind
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh
from scaled_gemm_cases import E4M3, MXFP8, near
from scaled_matmul_cases import (
    CURRENT,
    DELAYED,
    GATHER,
    SCALES,
    SCATTER,
    K,
    N,
    check,
    check_state,
    expected,
    given_state,
    of,
    run_all,
    state_of,
    value_and_gradients,
)

from jax_cp_dispatch.buffers import create_comm_overlap_buffer


@pytest.mark.parametrize(
    "op, mode, names",
    [
        (GATHER, DELAYED, ("ring",)),
        (GATHER, MXFP8, ("none", "ring, no copies", "xla")),
        (SCATTER, DELAYED, ("ring",)),
        (SCATTER, CURRENT, ("none", "ring", "pipeline of 3", "xla")),
    ],
)
def test_methods_with_uneven_tokens(op, mode, names):
    """Rows after a rank's own tokens, in x or dy, reach no value, scale or state."""
    p, counts = 3, (2, 0, 4)
    x, w, dy, bias = of(op, p, (2,), 2)
    gathers = op is GATHER
    rows = [max(counts), sum(counts)]
    x, dy = (np.resize(a, (*a.shape[:-2], n, a.shape[-1]))
             for a, n in zip((x, dy), rows if gathers else rows[::-1], strict=True))  # fmt: skip
    want = expected(op, (x, w, dy, bias), mode, counts)
    real = [oracle.real(x, counts), w, dy] if gathers else [x, w, oracle.real(dy, counts)]
    moved = with_nan_behind(x if gathers else dy, counts)
    moved[1] = 1e6  # this rank has no tokens
    x, dy = (moved, dy) if gathers else (x, moved)
    mesh = mesh_of(p, (2, 0, 1))
    results = run_all(op, mesh, mode, x, w, bias, dy, names=names, counts=counts)
    for name, got in results.items():
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


# ---- Places.


@pytest.mark.parametrize("op, mode", [(GATHER, CURRENT), (SCATTER, DELAYED)])
def test_groups_share_a_state_but_no_current_scale(op, mode):
    """Two groups of four ranks: each has its own current scale; both share a delayed state."""
    p, names = 4, ("data", "tp")
    first = of(op, p, (), 2)
    groups = first, [a * np.float32(size) for a, size in zip(first, (1, 3, 4, 5), strict=True)]
    x, w, dy, bias = (np.concatenate(each) for each in zip(*groups, strict=True))
    call = partial(op, axis_name="tp", method="ring", scaling_mode=mode)

    def local(*arrays):
        arrays = [a[0] for a in arrays]
        *got, after = value_and_gradients(call, *arrays, given_state(mode))
        return [a[None] for a in got], after

    mapped = jax.shard_map(
        local, mesh=permuted_mesh((2, p), names), in_specs=P(names), out_specs=(P(names), P())
    )
    got, after = jax.jit(mapped)(x, w, bias, dy)
    for group, arrays in enumerate(groups):
        own = [a[group * p : (group + 1) * p] for a in got]
        check(own, expected(op, arrays, mode), group)
    if mode == DELAYED:
        check_state(after, {"x": x, "w": w, "dy": dy})


def test_arrays_replicated_over_another_axis():
    """The result is equal on all of its ranks, as JAX's types show."""
    x, w, _, bias = arrays = of(GATHER, 4, (), 2)
    options: Any = {"scaling_mode": DELAYED, "scaling_state": given_state(DELAYED)}
    call = partial(GATHER, axis_name="tp", method="ring", **options)
    run = lambda x, w, bias: call(x[0], w[0], bias=bias[0])[None]
    mesh = permuted_mesh((2, 4), ("data", "tp"))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    near(jax.jit(mapped)(x, w, bias), expected(GATHER, arrays, DELAYED)[0])


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
    wants = [expected(op, each, CURRENT) for (op, _), each in zip(calls, arrays, strict=True)]
    check(gathered, wants[0], "gather")
    check(summed[1:], wants[1][1:], "scatter")  # dx, dw, dbias; y from rounded parts
    off = np.abs(np.asarray(summed[0]) - wants[1][0]).max() / np.abs(wants[1][0]).max()
    assert 1e-5 < off < p * 2**-8


# ---- Global arrays: the same as on ranks.


def on_global(op, mesh, mode, *placed):
    call = partial(op, axis_name="tp", method="ring", scaling_mode=mode, mesh=mesh)
    run = lambda x, w, bias, dy: value_and_gradients(call, x, w, bias, dy, given_state(mode))
    return jax.jit(run)(*placed)


@pytest.mark.parametrize("kind, mode", [(AxisType.Auto, CURRENT), (AxisType.Explicit, DELAYED)])
def test_global_arrays(kind, mode):
    """With a batch sharded over another axis."""
    dp, p = 2, 4
    mesh = permuted_mesh((dp, p), ("dp", "tp"), kind)
    per_rank = of(GATHER, p, (dp,), 2)
    joined = lambda parts, axis: np.concatenate(list(parts), axis=axis)
    x, w, dy, bias = map(joined, per_rank, (-2, 1, -1, 0))
    specs = P("dp", "tp"), P(None, "tp"), P("tp"), P("dp", None, "tp")
    placed = (jax.device_put(a, NamedSharding(mesh, spec))
              for a, spec in zip((x, w, bias, dy), specs, strict=True))  # fmt: skip
    got = on_global(GATHER, mesh, mode, *placed)
    # A current scale of x belongs to a group of ranks, which has a part of the batch.
    parts = [per_rank] if mode != CURRENT else [
        [a[:, i : i + 1] if a.ndim == 4 else a for a in per_rank] for i in range(dp)
    ]  # fmt: skip
    wants = [expected(GATHER, each, mode) for each in parts]
    y, dx, dw, dbias = zip(*wants, strict=True)
    near(got[0], joined(np.concatenate(y, axis=1), -1))
    near(got[1], joined(np.concatenate(dx, axis=1), -2))
    near(got[2], joined(np.sum(dw, axis=0), -1))
    near(got[3], np.sum(dbias, axis=0).ravel())
    if mode == DELAYED:
        check_state(got[-1], {"x": x, "w": w, "dy": dy})


def test_global_sums():
    """Tokens that do not divide, with automatic axes; another axis shards nothing."""
    p, rows, counts = 4, 7, (2, 2, 2, 1)
    mesh = permuted_mesh((2, p), ("dp", "tp"))
    x, w, dy, bias = of(SCATTER, p, (), 2)
    x, dy = x[:, :rows], oracle.real(dy, counts)
    want = expected(SCATTER, (x, w, dy, bias), DELAYED, counts)
    flat = lambda a: a.reshape(-1, a.shape[-1])[:rows]
    whole = np.concatenate(list(x), axis=-1), np.concatenate(list(w)), bias[0], flat(dy)
    placed = (jax.device_put(a, NamedSharding(mesh, P())) for a in whole)
    y, dx, dw, dbias, after = on_global(SCATTER, mesh, DELAYED, *placed)
    near(y, flat(want[0]))
    near(dx, np.concatenate(list(want[1]), axis=-1))
    near(dw, np.concatenate(list(want[2])))
    near(dbias, want[3].sum(0))
    check_state(after, {"x": x, "w": w, "dy": dy})
