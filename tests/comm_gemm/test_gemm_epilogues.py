"""Bias, GELU, its derivative and the bias gradient, fused into GEMMs.

Every scaling mode, transposition and kind of chunk."""

import itertools
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import close, equal, integers, normal
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of, on_ranks
from scaled_gemm_cases import (
    E4M3,
    GATHERING,
    MODES,
    MXFP8,
    Scaled,
    drawn_by_ranks,
    gelu,
    gelu_derivative,
    laid,
    near,
)

from jax_cp_dispatch import gemm
from jax_cp_dispatch.buffers import create_comm_overlap_buffer

K, N, T = 64, 6, 3
WIDE, CURRENT = "NO_SCALING", MODES[1]
LAYOUTS = list(itertools.product((False, True), (False, True)))  # lhs, rhs transposed


def draw(seed, num_ranks, mode, shape, layout="row") -> Scaled:
    """Operands whose products cover the range in which GELU bends, and beyond it."""
    if mode == WIDE:
        x = normal(seed, num_ranks, *shape) / np.float32(4)
        return Scaled(x, np.zeros((num_ranks, 1)), x.astype(np.float64))
    return drawn_by_ranks(seed, num_ranks, mode, E4M3, shape, layout, -9)


def scaled(lhs, rhs, mode, **options):
    """Returns the call and its operands: data and scales; without scaling, no scales."""

    def call(*operands, **more):
        a, a_scale, b, b_scale = map(jnp.asarray, operands)
        scales = {"lhs_scale_inv": a_scale, "rhs_scale_inv": b_scale}
        return gemm(a, b, scaling_mode=mode, **({} if mode == WIDE else scales), **options, **more)

    return call, (*lhs[:2], *rhs[:2])


def all_epilogues(call, bias, gelu_input, **options):
    """Returns the epilogues by name, computed from the complete sum."""
    return {
        "bias": call(bias=bias, **options),
        "gelu": call(fuse_gelu=True, **options),
        "bias, gelu": call(bias=bias, fuse_gelu=True, **options),
        "dgelu": call(fuse_gelu=True, grad=True, gelu_input=gelu_input, **options),
        "dgelu, dbias": call(
            fuse_gelu=True, fuse_bias=True, grad=True, gelu_input=gelu_input, **options
        ),
        "dbias": call(fuse_bias=True, grad=True, **options),
    }


def check_all(results, product, bias, gelu_input, rhs_sum, name):
    """The product in float64, [..., m, n], and `rhs_sum`, the sum of rhs over the contraction."""
    near(results["bias"], product + bias, name)
    out, pre = results["gelu"]
    near(pre, product, name)
    near(out, gelu(product), name)
    out, pre = results["bias, gelu"]
    near(pre, product + bias, name)
    near(out, gelu(product + bias), name)
    want = product * gelu_derivative(gelu_input)
    near(results["dgelu"], want, name)
    out, dbias = results["dgelu, dbias"]
    near(out, want, name)
    near(dbias, np.asarray(out).astype(np.float64).sum(-2), name)
    out, dbias = results["dbias"]
    near(out, product, name)
    near(dbias, rhs_sum, name)


# ---- One device.


@pytest.mark.parametrize("mode", [WIDE, CURRENT, MXFP8])
def test_every_transposition(mode):
    """In float32, and once more for each: in bfloat16, by XLA, or both."""
    m = 70
    narrow = partial(np.asarray, dtype=jnp.bfloat16)
    bias, gelu_input = narrow(normal(2, N)), narrow(3 * normal(3, m, N))
    others = ("float32", "xla"), ("bfloat16", None), ("bfloat16", "xla"), ("bfloat16", None)
    calls, operands, wants = {}, {}, {}
    for left, right in LAYOUTS:
        lhs = draw(0, 1, mode, (K, m) if left else (m, K), "column" if left else "row")
        rhs = draw(1, 1, mode, (N, K) if right else (K, N), "row" if right else "column")
        dims = ((0,) if left else (1,), (1,) if right else (0,))
        calls[left, right], _ = scaled(lhs, rhs, mode, contracting_dims=dims)
        operands[str((left, right))] = [x[0] for x in (*lhs[:2], *rhs[:2])]
        by_row = laid(lhs.values[0], "column" if left else "row")
        of_rhs = laid(rhs.values[0], "column" if right else "row")
        wants[str((left, right))] = by_row @ of_rhs, of_rhs.sum(0)

    def local(operands):
        return {
            str(layout): [
                all_epilogues(
                    partial(call, *operands[str(layout)]),
                    *map(jnp.asarray, (bias, gelu_input)),
                    preferred_element_type=out,
                    implementation=implementation,
                )
                for out, implementation in (("float32", None), other)
            ]
            for (layout, call), other in zip(calls.items(), others, strict=True)
        }

    added, before = oracle.wide(bias, gelu_input)
    for name, results in jax.jit(local)(operands).items():
        for result in results:
            product, rhs_sum = wants[name]
            check_all(result, product, added, before, rhs_sum, name)


def test_gelu_of_large_arguments():
    """There is no NaN where the cube overflows or tanh is 1."""
    x = np.array([-1e20, -1e13, -200, -30, -9, -5, -1, -1e-3, 0, 1e-3, 1, 5, 9, 30, 200, 1e20])
    x = x[:, None].astype(np.float32)
    one = jnp.ones((1, 1))
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            values, ones = jnp.asarray(x, dtype), jnp.ones((x.size, 1), dtype)
            out, pre = gemm(values, one.astype(dtype), fuse_gelu=True)
            np.testing.assert_array_equal(pre, x)
            rtol = 1e-5 if dtype == "float32" else 1e-13
            np.testing.assert_allclose(out, gelu(x), rtol=rtol, atol=rtol)
            slope = gemm(ones, one.astype(dtype), fuse_gelu=True, grad=True, gelu_input=values)
            want = gelu_derivative(np.clip(x, -30, 30))  # 0 and 1 outside
            np.testing.assert_allclose(slope, want, rtol=rtol, atol=rtol)


def test_results_of_several_dimensions():
    """pre_gelu and gelu_input have the output's shape; a bias is one row."""
    lhs, rhs = normal(0, 2, 3, 4), normal(1, 4, 5, 6)
    lhs, rhs, bias = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(normal(2, 30))
    out, pre = gemm(lhs, rhs, bias=bias, fuse_gelu=True)
    want = np.einsum("abk,kcd->abcd", *oracle.wide(lhs, rhs)) + np.reshape(bias, (5, 6))
    near(pre, want)
    near(out, gelu(want))
    out, dbias = gemm(lhs, rhs, fuse_gelu=True, fuse_bias=True, grad=True, gelu_input=pre)
    near(out, (want - np.reshape(bias, (5, 6))) * gelu_derivative(pre))
    near(dbias, np.asarray(out, np.float64).sum((0, 1)).ravel())


def test_derivative_of_gelu():
    """First and second derivatives of both results, in every transposition, in float64."""
    with jax.enable_x64(True):
        draw = lambda seed, *shape: jnp.asarray(normal(seed, *shape), np.float64)
        a, b, bias = draw(0, 5, 7), draw(1, 7, 6), draw(2, N)
        dout, dpre = draw(3, 5, N), draw(4, 5, N)
        z = np.asarray(a @ b + bias)
        dz = dout * gelu_derivative(z) + dpre
        want = dz @ b.T, a.T @ dz, dz.sum(0)

        def gradients(a, b, bias, dout, dpre):
            results = {}
            for left, right in LAYOUTS:
                dims = ((0,) if left else (1,), (1,) if right else (0,))
                fused = partial(gemm, contracting_dims=dims, fuse_gelu=True)
                call = lambda a, b, bias, fused=fused, left=left, right=right: fused(
                    a.T if left else a, b.T if right else b, bias=bias
                )
                results[f"{left}, {right}"] = jax.vjp(call, a, b, bias)[1]((dout, dpre))
            return results

        for name, got in jax.jit(gradients)(a, b, bias, dout, dpre).items():
            for one, expected in zip(got, want, strict=True):
                close(one, expected, "float64", name)

        plain = lambda a, b: jax.nn.gelu(a @ b)
        fused = lambda a, b: gemm(a, b, fuse_gelu=True)[0]
        slope = lambda fn: lambda a: jnp.sum(jax.grad(lambda a: jnp.sum(fn(a, b) ** 2))(a) * a)
        close(jax.jit(jax.grad(slope(fused)))(a), jax.grad(slope(plain))(a), "float64")


def test_epilogues_of_empty_operands():
    """No rows, a contracted dimension of size zero, or no columns."""
    sizes = (0, 4, N), (5, 0, N), (5, 4, 0)
    operands = [(normal(0, n), normal(1, m, n)) for m, _, n in sizes]

    def run(operands):
        return [
            all_epilogues(partial(gemm, jnp.ones((m, k)), jnp.ones((k, n))), bias, gelu_input)
            for (m, k, n), (bias, gelu_input) in zip(sizes, operands, strict=True)
        ]

    results = jax.jit(run)(operands)
    for (m, k, n), (bias, gelu_input), result in zip(sizes, operands, results, strict=True):
        check_all(result, np.full((m, n), k), bias, gelu_input, np.full(n, k), (m, k, n))


# ---- Chunks.


def test_chunks_of_an_all_gather():
    """Each chunk's part of the output, and one bias gradient from all chunks."""
    p, mode = 4, CURRENT
    lhs = draw(0, p, mode, (T, K))
    rhs = draw(1, p, mode, (K, N), "column")
    options: Any = {"axis_name": AXIS, "preferred_element_type": jnp.float32}
    call, operands = scaled(lhs, rhs, mode, **options)
    create = partial(create_comm_overlap_buffer, tp_size=p)
    back = create("RS", "RING_EXCHANGE", (p * T, N), "float32", atomic_gemm=True)
    ways = {
        name: partial(call, comm_overlap=create("AG", "RING_EXCHANGE", (p * T, K), E4M3, **more),
                      paired_comm_overlap=back if "atomic_gemm" in more else None)
        for name, more in GATHERING.items()
    }  # fmt: skip
    ways["xla"] = partial(ways["ring"], implementation="xla")
    ways["xla, atomic"] = partial(ways["ring, atomic"], implementation="xla")
    bias, gelu_input = normal(2, p, N), 3 * normal(3, p, p * T, N)

    def local(bias, gelu_input, *operands):
        return {
            name: all_epilogues(partial(way, *operands), bias, gelu_input)
            for name, way in ways.items()
        }

    run = on_ranks(local, mesh_of(p, (2, 0, 3, 1)))
    for name, results in run(bias, gelu_input, *operands).items():
        product, _ = oracle.engine_gather(lhs.values, rhs.values, atomic="atomic" in name)
        biases, sums = bias[:, None], rhs.values.sum(1)
        check_all(results, product, biases, gelu_input, sums, name)


def test_bias_of_sums_and_during_bulk():
    """The bias is added once; its gradient uses this rank's rhs, whatever is summed."""
    p, mode = 4, WIDE
    lhs = draw(0, p, mode, (p * T, K))
    rhs = draw(1, p, mode, (K, N), "column")
    options: Any = {"axis_name": AXIS, "preferred_element_type": jnp.float32}
    call, operands = scaled(lhs, rhs, mode, **options)
    create = partial(create_comm_overlap_buffer, tp_size=p, buffer_dtype="float32")
    reducing: Any = {
        "ring": ("RING_EXCHANGE", {}),
        "ring, atomic": ("RING_EXCHANGE", {"atomic_gemm": True}),
        "ring, no copies": ("RING_EXCHANGE", {"use_ce": False}),
        "pipeline": ("PIPELINE", {}),
        "pipeline, atomic": ("PIPELINE", {"atomic_gemm": True}),
    }
    ways = {
        name: partial(call, comm_overlap=create("RS", method, buffer_shape=(p * T, N), **more))
        for name, (method, more) in reducing.items()
    }
    ways["xla"] = partial(ways["ring"], implementation="xla")
    bulk = {kind: create(kind, "BULK", buffer_shape=(p * T, 5)) for kind in ("AG", "RS")}
    bias = np.stack([100 * normal(2, N)] * p)
    part, whole = integers(3, p, T, 5), integers(4, p, p * T, 5)

    def local(bias, part, whole, *operands):
        each = {
            name: (way(*operands, bias=bias), way(*operands, fuse_bias=True, grad=True))
            for name, way in ways.items()
        }
        moved = [
            call(*operands, comm_overlap=bulk[kind], aux_in=aux, fuse_bias=True, grad=True)
            for kind, aux in (("AG", part), ("RS", whole))
        ]
        return each, moved

    run = on_ranks(local, mesh_of(p, (2, 0, 3, 1)))
    results, moved = run(bias, part, whole, *operands)
    sums = rhs.values.sum(1)
    for name, (with_bias, (out, dbias)) in results.items():
        is_atomic = name == "ring, atomic"
        want = oracle.engine_scatter(lhs.values, rhs.values, atomic=is_atomic)
        near(with_bias, want + bias[:, None], name)
        near(out, want, name)
        near(dbias, sums, name)
    wants = oracle.bulk_gather(part), oracle.bulk_scatter(whole)
    for (out, dbias, aux), want in zip(moved, wants, strict=True):
        near(out, lhs.values @ rhs.values)
        near(dbias, sums)
        equal(aux, want)


def test_a_layer_and_its_derivative_by_hand():
    """The purpose of the epilogues: gelu(x w + b) forward, and dx, dw and db from fused parts."""
    p = 2
    x, w, bias = normal(0, p, T, K) / 4, normal(1, p, K, N), normal(2, p, N)
    dhidden = normal(3, p, p * T, N)  # of the layer's output
    shape = (p * T, K)
    gather = create_comm_overlap_buffer("AG", "RING_EXCHANGE", shape, "float32", p)
    scatter = create_comm_overlap_buffer("RS", "RING_EXCHANGE", shape, "float32", p)

    def local(x, w, bias, dhidden):
        call = partial(gemm, axis_name=AXIS)
        fused: Any = {"bias": bias, "fuse_gelu": True, "return_aux": True}
        hidden, pre, gathered = call(x, w, comm_overlap=gather, **fused)
        # dhidden replaces a product with the next layer's weight.
        eye = jnp.eye(N)
        backward: Any = {"fuse_gelu": True, "fuse_bias": True, "grad": True, "gelu_input": pre}
        dpre, dbias = gemm(dhidden, eye, **backward)
        dx = call(dpre, w, comm_overlap=scatter, contracting_dims=((1,), (1,)))
        dw = gemm(gathered, dpre, contracting_dims=((0,), (0,)))
        return hidden, dx, dw, dbias

    hidden, dx, dw, dbias = on_ranks(local, mesh_of(p))(x, w, bias, dhidden)
    z = oracle.all_gather_matmul(x, w, bias)
    near(hidden, gelu(z))
    dz = dhidden * gelu_derivative(z)
    wants = oracle.all_gather_matmul_gradients(x, w, dz)
    for got, want in zip((dx, dw, dbias), wants, strict=True):
        near(got, want)
