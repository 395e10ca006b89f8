"""Overlapped GEMMs of global arrays: tokens over context and tensor parallelism, padding, stages.

Tokens over ("cp", "tp") are gathered over tp alone. The product's tokens stay sharded over cp; the
sum's are sharded over both again, forward and backward. The compiled text shows that nothing is
gathered over cp.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_cases import equal
from inner import pretend_tpus, warn_again
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter

B, T, D, F = 4, 64, 8, 16
B, T, D, F = 4, 64, 8, 16
AXES = ("data", "cp", "tp")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"automatic": AUTO, "explicit": EXPLICIT}
TOKENS, HIDDEN = P("data", ("cp", "tp")), P("data", "cp", "tp")
COLLECTIVES = r" (all-gather|all-to-all|reduce-scatter|collective-permute|all-reduce)(?:-start)?\("


@pytest.fixture(autouse=True)
def every_warning_is_said():
    warn_again()


def mesh_of(sizes, kind="automatic", names=AXES):
    return jax.make_mesh(sizes, names, axis_types=(KINDS[kind],) * len(names))


def integers(rng, *shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


def put(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def operands(mesh, tokens=TOKENS, shape=(B, T)):
    """x, a column-sharded weight and its bias, a row-sharded weight and its bias, on the mesh."""
    rng = np.random.default_rng()
    shapes = (*shape, D), (D, F), (F,), (F, D), (D,)
    plain = [integers(rng, *shape) for shape in shapes]
    specs = tokens, P(None, "tp"), P("tp"), P("tp", None), P()
    return plain, [put(mesh, x, spec) for x, spec in zip(plain, specs, strict=True)]


def up(x, w, b=None, **options):
    return all_gather_matmul(x, w, axis_name="tp", bias=b, method="ring", **options)


def two_layers(x, w, b, w2, b2, *, gathered="keep", **options):
    hidden = up(x, w, b, gathered=gathered, **options)
    return matmul_reduce_scatter(hidden, w2, axis_name="tp", bias=b2, method="ring", **options)


def dense_two_layers(x, w, b, w2, b2):
    return (x @ w + b) @ w2 + b2


def dense_gradients(plain, dy):
    """Returns the gradients of (y * dy).sum(), from the definition."""
    x, w, b, w2, _ = plain
    h, dh = x @ w + b, dy @ w2.T
    over_tokens = tuple(range(x.ndim - 1))
    product = lambda a, c: np.tensordot(a, c, (over_tokens, over_tokens))
    return dh @ w.T, product(x, dh), dh.sum(over_tokens), product(h, dy), dy.sum(over_tokens)


def run(program, *arrays):
    """Returns the result, and the kinds of XLA collectives in the compiled program."""
    compiled = jax.jit(program).lower(*arrays).compile()
    return compiled(*arrays), set(re.findall(COLLECTIVES, compiled.as_text() or ""))


def sharded_like(cotangent, result):
    sharding = jax.typeof(result).sharding
    is_typed = EXPLICIT in sharding.mesh.axis_types
    return jax.sharding.reshard(cotangent, sharding) if is_typed else jnp.asarray(cotangent)


def split_as(array, spec):
    """Whether a result is sharded by this spec, ignoring axes of one device."""
    want = NamedSharding(array.sharding.mesh, spec)
    return array.sharding.is_equivalent_to(want, array.ndim)


# ---- Tokens keep their other axes.


@pytest.mark.parametrize("kind, gathered", [("explicit", "keep"), ("automatic", "again")])
def test_a_residual_stream_and_its_gradients(kind, gathered):
    """In a loop. The stream and dx keep their sharding.

    Weight gradients are summed over data and cp; nothing else moves.
    """
    mesh = mesh_of((2, 2, 2), kind)
    plain, placed = operands(mesh)
    dy = integers(np.random.default_rng(), B, T, D)

    def loss_and_output(dy, x, *weights):
        add = lambda total, size: (total + size * two_layers(x, *weights, gathered=gathered), None)
        out, _ = jax.lax.scan(add, x, jnp.array([1.0, 2.0]))
        return (out * dy).sum(), out

    gradients: Any = jax.grad(loss_and_output, range(1, 6), has_aux=True)
    with jax.set_mesh(mesh):
        (got, out), found = run(gradients, put(mesh, dy, TOKENS), *placed)
    equal(out, plain[0] + 3 * dense_two_layers(*plain))
    assert split_as(out, TOKENS) and split_as(got[0], TOKENS) and found == {"all-reduce"}
    dx, *of_weights = dense_gradients(plain, 3 * dy)
    for gradient, want in zip(got, (dx + dy, *of_weights), strict=True):
        equal(gradient, want)


@pytest.mark.parametrize(
    "sizes, tokens, shape",
    [
        ((2, 2, 2), P(None, "data", ("cp", "tp")), (3, 2, T)),
        ((2, 2, 2), P(AXES), (T,)),
        ((1, 4, 2), P("data", "cp"), (B, T)),
    ],
)
def test_placements(sizes, tokens, shape, recwarn):
    """Each batch dimension keeps its axes; tokens may be sharded over several other axes.

    Over another axis alone, they end up sharded over both. There is no warning.
    """
    mesh = mesh_of(sizes)
    plain, placed = operands(mesh, tokens, shape)
    out, found = run(partial(two_layers, mesh=mesh), *placed)
    equal(out, dense_two_layers(*plain))
    assert split_as(out, TOKENS if tokens == P("data", "cp") else tokens)
    assert not found or (tokens == P("data", "cp") and "all-gather" not in found)
    assert not [w for w in recwarn if "tokens are split" in str(w.message)]


@pytest.mark.parametrize(
    "tokens, num_tokens, says",
    [
        (P("data", ("tp", "cp")), T, "Call inside jax.shard_map, reshape tokens"),
        (P("data", "cp"), 12, "12 tokens are not a multiple of 8"),
    ],
)
def test_tokens_that_xla_gathers_with_a_warning(tokens, num_tokens, says):
    """Tokens over ("tp", "cp") are not adjacent in a group of ranks; 12 divide among 4 devices."""
    mesh = mesh_of((1, 4, 2))
    (x, w, b, *_), placed = operands(mesh, tokens, (B, num_tokens))
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match=says):
        out, _ = run(up, *placed[:3])
    equal(out, x @ w + b)


def test_the_ranks_axis_first_over_explicit_axes():
    """Tokens are moved, not gathered."""
    mesh = mesh_of((1, 4, 2), "explicit")
    (x, w, b, *_), placed = operands(mesh, P("data", ("tp", "cp")))
    with jax.set_mesh(mesh):
        out, found = run(up, *placed[:3])
    assert split_as(out, HIDDEN) and "all-gather" not in found
    equal(out, x @ w + b)


# ---- Two layers of a batch over another axis equal dense ones.

OTHER_WAYS = {
    "tokens that do not divide": (7, (AUTO, AUTO), {"gathered": "again"}),
    "explicit axes, known from the arrays": (7, (EXPLICIT, EXPLICIT), {}),
    "an explicit axis around the ranks": (8, (EXPLICIT, AUTO), {}),
    # The deadline is that of no other program, so that JAX lowers this one anew.
    "as on TPUs": (8, (AUTO, AUTO), {"implementation": "xla", "deadline": 59.0}),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_two_layers_and_their_gradients_equal_dense_ones(way, monkeypatch):
    rows, kinds, options = OTHER_WAYS[way]
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=kinds)
    plain, placed = operands(mesh, P("data", "tp") if rows == 8 else P("data"), shape=(B, rows))
    layers = partial(two_layers, **options)
    if way == "as on TPUs":
        layers = partial(layers, mesh=mesh)
        text = jax.jit(layers).trace(*placed).lower(lowering_platforms=("tpu",)).as_text()
        assert "manual_computation" in text and "CustomSPMDPartitioning" not in text
        pretend_tpus(monkeypatch)
    if "around" in way:
        specs = P(None, "tp"), P(None, "tp"), P("tp"), P("tp"), P()
        layers = jax.shard_map(layers, in_specs=specs, out_specs=P(None, "tp"), axis_names={"tp"})
    dy = integers(np.random.default_rng(), B, rows, D)

    @jax.jit
    def both(*arrays):
        out, pull = jax.vjp(layers, *arrays)
        return out, pull(sharded_like(dy, out))

    if "known" in way:
        out, gradients = both(*placed)
    else:
        with jax.set_mesh(mesh):
            out, gradients = both(*placed)
    equal(out, dense_two_layers(*plain))
    if way == "as on TPUs":
        assert split_as(out, P("data", "tp"))
    for got, want in zip(gradients, dense_gradients(plain, dy), strict=True):
        equal(got, want)


# ---- Several weights of one x, of heads and their features.


def two_products(mesh, x, wq, up, out, bias):
    """The projection of q, and another product of x."""
    options: Any = {"axis_name": "tp", "mesh": mesh, "method": "ring"}
    q, hidden = all_gather_matmul(x, (wq, up), bias=(bias, None), **options)
    return matmul_reduce_scatter(q, out, **options), hidden


def dense_products(x, wq, up, out, bias):
    q = np.einsum("btd,dnh->btnh", x, wq) + bias
    return np.einsum("btnh,nhd->btd", q, out), x @ up


def gradients_of_products(x, wq, up, out, bias, dy, dh):
    q = np.einsum("btd,dnh->btnh", x, wq) + bias
    dq = np.einsum("btd,nhd->btnh", dy, out)
    dx = np.einsum("btnh,dnh->btd", dq, wq) + dh @ up.T
    dwq, dup = np.einsum("btd,btnh->dnh", x, dq), np.einsum("btd,btf->df", x, dh)
    return dx, dwq, dup, np.einsum("btnh,btd->nhd", q, dy), dq.sum((0, 1))


@pytest.mark.parametrize("kind, rows", [("automatic", 7), ("explicit", 8)])
def test_several_weights(kind, rows):
    mesh, rng = mesh_of((2, 4), kind, ("data", "tp")), np.random.default_rng()
    shapes = (B, rows, 12), (12, 8, 3), (12, 4), (8, 3, 12), (8, 3)
    plain = [integers(rng, *shape) for shape in shapes]
    expected = dense_products(*plain)
    cotangents = [integers(rng, *a.shape) for a in expected]
    specs = [P("data", "tp") if rows == 8 else P("data"), *[P(None, "tp")] * 2, P("tp"), P("tp")]
    placed = [put(mesh, a, spec) for a, spec in zip(plain, specs, strict=True)]

    def both(*arrays):
        out, pull = jax.vjp(partial(two_products, mesh), *arrays)
        return out, pull(tuple(map(sharded_like, cotangents, out)))

    (out, gradients), found = run(both, *placed)
    wants = *expected, *gradients_of_products(*plain, *cotangents)
    for got, want in zip((*out, *gradients), wants, strict=True):
        equal(got, want)
    if rows == 8:
        assert not found - {"all-reduce"}
        assert all(map(split_as, gradients, specs))


# ---- Stages of a pipeline: `jax.vmap`, with weights of each stage or the same for all.

STAGES, ROWS = 2, 8
SPECS = {  # of x, w and result of one stage
    all_gather_matmul: (P("data", "tp"), P(None, "tp"), P("data", None, "tp")),
    matmul_reduce_scatter: (P("data", None, "tp"), P("tp", None), P("data", "tp", None)),
}


def stages(kind="automatic"):
    return mesh_of((STAGES, 2, 2), kind, ("stage", "data", "tp"))


def check(fn, has_weights, spmd, mesh, op):
    """Compares the product of integers and its gradients with the definition."""
    rng, specs = np.random.default_rng(), SPECS[op]
    x, dy = integers(rng, STAGES, 2, ROWS, 4), integers(rng, STAGES, 2, ROWS, 8)
    w = integers(rng, *([STAGES] if has_weights else []), 4, 8)
    stage = "stage" if spmd else None
    of_w = P(stage, *specs[1]) if has_weights else specs[1]
    places = P(stage, *specs[0]), of_w, P(stage, *specs[2])
    mapped = jax.vmap(fn, in_axes=(0, 0 if has_weights else None), spmd_axis_name=spmd)
    placed = [put(mesh, a, spec) for a, spec in zip((x, w, dy), places, strict=True)]

    @jax.jit
    def both(x, w, dy):
        out, pull = jax.vjp(mapped, x, w)
        return out, *pull(dy)

    with jax.set_mesh(mesh):
        out, dx, dw = both(*placed)
    each = w[:, None] if has_weights else w
    of_w = np.einsum("sbtk,sbtn->skn", x, dy)
    wants = x @ each, dy @ np.swapaxes(each, -1, -2), of_w if has_weights else of_w.sum(0)
    for got, want in zip((out, dx, dw), wants, strict=True):
        equal(got, want)
    return zip((out, dx, dw), (places[2], *places[:2]), strict=True)


@pytest.mark.parametrize(
    "op, options, has_weights, spmd, around",
    [
        (all_gather_matmul, {}, False, "stage", True),
        (matmul_reduce_scatter, {}, True, "stage", True),
        (all_gather_matmul, {"gathered": "again"}, True, "stage", False),
        (matmul_reduce_scatter, {}, False, None, False),
    ],
)
def test_stages(op, options, has_weights, spmd, around):
    """Around a `shard_map`, and of global arrays: each stage's devices compute its examples."""
    mesh, (*inputs, out) = stages(), SPECS[op]
    fn = partial(op, axis_name="tp", method="ring", **options)
    if around:  # JAX's check of varying axes fails for any custom derivative under spmd_axis_name
        specs: Any = {"in_specs": tuple(inputs), "out_specs": out}
        fn = jax.shard_map(fn, mesh=mesh, **specs, check_vma=False)
    for array, spec in check(fn, has_weights, spmd, mesh, op):
        assert split_as(array, spec)


def test_stages_over_explicit_axes():
    op = all_gather_matmul
    call = partial(op, axis_name="tp", method="ring")
    check(call, True, None, stages("explicit"), op)
    with pytest.raises(ValueError, match=r"^all_gather_matmul: .*explicit mesh axis 'stage'.*Auto"):
        check(call, True, "stage", stages("explicit"), op)


def test_two_vmaps_on_global_arrays():
    """Of several weights, one with heads."""
    rng = np.random.default_rng()
    x, w, b = integers(rng, 2, 3, 2, ROWS, 4), integers(rng, 2, 3, 4, 8), integers(rng, 3, 8)
    heads = integers(rng, 2, 3, 4, 2, 3)
    call = lambda x, w, heads, b: up(x, (w, heads), (b, None), mesh=stages())
    out, of_heads = jax.jit(jax.vmap(jax.vmap(call), in_axes=(0, 0, 0, None)))(x, w, heads, b)
    equal(out, x @ w[:, :, None] + b[:, None, None])
    equal(of_heads, np.einsum("sebtd,sednh->sebtnh", x, heads))
