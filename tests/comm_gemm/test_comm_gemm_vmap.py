"""Tensor-parallel GEMMs, and GEMMs on one device, under `jax.vmap` as in pipelines.

With and without `spmd_axis_name`, with weights per example or shared, inside `shard_map` and on
global arrays, forward and backward.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, gemm, grouped_gemm, matmul_reduce_scatter

STAGES, B, T, K, N = 2, 2, 8, 4, 8
SPECS = {  # of x, w and result of one stage
    all_gather_matmul: (P("dp", "tp"), P(None, "tp"), P("dp", None, "tp")),
    matmul_reduce_scatter: (P("dp", None, "tp"), P("tp", None), P("dp", "tp", None)),
}


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((STAGES, 2, 2), ("stage", "dp", "tp"), axis_types=(kind,) * 3)


def integers(rng, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32)


def operands(has_weights):
    """Returns x, w, dy, and the product and its gradients from the definition."""
    rng = np.random.default_rng()
    x, dy = integers(rng, STAGES, B, T, K), integers(rng, STAGES, B, T, N)
    w = integers(rng, *([STAGES] if has_weights else []), K, N)
    each = w[:, None] if has_weights else w
    dw = np.einsum("sbtk,sbtn->skn", x, dy)
    gradients = dy @ np.swapaxes(each, -1, -2), dw if has_weights else dw.sum(0)
    return (x, w, dy), x @ each, gradients


def check(fn, has_weights, spmd, mesh, specs):
    arrays, want, gradients = operands(has_weights)
    stage = "stage" if spmd else None
    of_w = P(stage, *specs[1]) if has_weights else specs[1]
    places = P(stage, *specs[0]), of_w, P(stage, *specs[2])
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    x, w, dy = [put(a, spec) for a, spec in zip(arrays, places, strict=True)]
    mapped = jax.vmap(fn, in_axes=(0, 0 if has_weights else None), spmd_axis_name=spmd)
    loss = lambda x, w, dy: (mapped(x, w) * dy).sum()
    with jax.set_mesh(mesh):
        out, got = jax.jit(lambda *a: (mapped(*a[:2]), jax.grad(loss, (0, 1))(*a)))(x, w, dy)
    np.testing.assert_array_equal(out, want)
    for gradient, expected in zip(got, gradients, strict=True):
        np.testing.assert_array_equal(gradient, expected)
    return out, got, places


@pytest.mark.parametrize(
    "op, has_weights, spmd",
    [
        (all_gather_matmul, True, None),
        (all_gather_matmul, False, "stage"),
        (matmul_reduce_scatter, True, "stage"),
    ],
)
def test_around_shard_map(op, has_weights, spmd):
    mesh, (of_x, of_w, of_out) = mesh_of(), SPECS[op]
    local = functools.partial(op, axis_name="tp", method="ring")
    # JAX's check of varying axes fails for any custom derivative under spmd_axis_name.
    each = jax.shard_map(
        local, mesh=mesh, in_specs=(of_x, of_w), out_specs=of_out, check_vma=spmd is None
    )
    check(each, has_weights, spmd, mesh, SPECS[op])


@pytest.mark.parametrize(
    "op, options, has_weights, spmd",
    [
        (all_gather_matmul, {}, True, "stage"),
        (all_gather_matmul, {"gathered": "again"}, True, None),
        (all_gather_matmul, {"gathered": "again"}, False, "stage"),
        (matmul_reduce_scatter, {}, False, None),
        (matmul_reduce_scatter, {}, True, "stage"),
    ],
)
def test_on_global_arrays(op, options, has_weights, spmd):
    """Each stage's devices compute their own examples; results are sharded like the operands."""
    mesh = mesh_of()
    fn = functools.partial(op, axis_name="tp", method="ring", mesh=mesh, **options)
    out, (dx, dw), (of_x, of_w, of_out) = check(fn, has_weights, spmd, mesh, SPECS[op])
    for array, spec in (out, of_out), (dx, of_x), (dw, of_w):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


@pytest.mark.parametrize("op", SPECS)
def test_on_global_arrays_over_explicit_axes(op):
    mesh = mesh_of(AxisType.Explicit)
    check(functools.partial(op, axis_name="tp", method="ring"), True, None, mesh, SPECS[op])


@pytest.mark.parametrize("op", SPECS)
def test_spmd_axis_name_of_an_explicit_axis_is_rejected(op):
    mesh = mesh_of(AxisType.Explicit)
    fn = functools.partial(op, axis_name="tp", method="ring")
    name = op.__name__
    with pytest.raises(ValueError, match=rf"^{name}: .*explicit mesh axis 'stage'.*AxisType\.Auto"):
        check(fn, True, "stage", mesh, SPECS[op])


def test_two_vmaps_on_global_arrays():
    mesh = mesh_of()
    rng = np.random.default_rng()
    x, w, b = integers(rng, 2, 3, B, T, K), integers(rng, 2, 3, K, N), integers(rng, 3, N)
    up = lambda x, w, b: all_gather_matmul(x, w, bias=b, axis_name="tp", method="ring", mesh=mesh)
    out = jax.jit(jax.vmap(jax.vmap(up), in_axes=(0, 0, None)))(x, w, b)
    np.testing.assert_array_equal(out, x @ w[:, :, None] + b[:, None, None])


@pytest.mark.parametrize("has_weights, spmd", [(True, "stage"), (False, None)])
def test_on_one_device(has_weights, spmd):
    specs = (P(),) * 3
    check(gemm, has_weights, spmd, mesh_of(), specs)
    check(lambda x, w: gemm(x, w, fuse_gelu=True)[1], has_weights, spmd, mesh_of(), specs)


@pytest.mark.parametrize("spmd", [None, "stage"])
def test_grouped(spmd):
    rng = np.random.default_rng()
    x, w, sizes = integers(rng, 2, T, K), integers(rng, 2, 2, K, N), jnp.array([3, 5])
    dy = integers(rng, 2, T, N)
    fn = jax.vmap(lambda x, w: grouped_gemm(x, w, sizes), spmd_axis_name=spmd)
    with jax.set_mesh(mesh_of()):
        out, pull = jax.vjp(jax.jit(fn), x, w)
        dx, dw = pull(jnp.asarray(dy))
    for group, rows in enumerate((slice(0, 3), slice(3, T))):
        np.testing.assert_array_equal(out[:, rows], x[:, rows] @ w[:, group])
        np.testing.assert_array_equal(dx[:, rows], dy[:, rows] @ np.swapaxes(w[:, group], 1, 2))
        np.testing.assert_array_equal(dw[:, group], np.swapaxes(x[:, rows], 1, 2) @ dy[:, rows])


@pytest.mark.parametrize(
    "op, kind", list(zip(SPECS, (AxisType.Auto, AxisType.Explicit), strict=True))
)
def test_no_tokens(op, kind):
    """Zero tokens or zero examples: empty results and gradients, and zeros for the weight."""
    mesh, (of_x, of_w, of_out) = mesh_of(kind), SPECS[op]
    local = functools.partial(op, axis_name="tp", method="ring")
    program = jax.shard_map(local, mesh=mesh, in_specs=(of_x, of_w), out_specs=of_out)
    for shape in ((B, 0, K), (0, T, K)):
        x = jax.device_put(jnp.ones(shape), NamedSharding(mesh, of_x))
        w = jax.device_put(jnp.ones((K, N)), NamedSharding(mesh, of_w))
        with jax.set_mesh(mesh):
            dx, dw = jax.jit(jax.grad(lambda x, w: program(x, w).sum(), (0, 1)))(x, w)
        assert dx.shape == shape
        np.testing.assert_array_equal(dw, np.zeros((K, N)))


@pytest.mark.parametrize(
    "op, kind", list(zip(SPECS, (AxisType.Explicit, AxisType.Auto), strict=True))
)
def test_one_rank(op, kind):
    """Every method of the operation, inside `shard_map` and on global arrays."""
    mesh = jax.make_mesh((2, 1), ("dp", "tp"), axis_types=(kind,) * 2)
    (x, w, _), want, _ = operands(has_weights=False)
    of_x, of_w, of_out = SPECS[op]
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    pipeline = ["pipeline"] if op is matmul_reduce_scatter else []
    for method in ("auto", "none", "ring", *pipeline):
        local = functools.partial(op, axis_name="tp", method=method)
        program = jax.shard_map(local, mesh=mesh, in_specs=(of_x, of_w), out_specs=of_out)
        with jax.set_mesh(mesh):
            for fn in (program, local):
                out = jax.jit(fn)(put(x[0], of_x), put(w, of_w))
                np.testing.assert_array_equal(out, want[0])
