"""Overlapped GEMMs of global arrays: tokens over context and tensor parallelism, padding, stages.

Tokens over ("cp", "tp") are gathered over tp alone. The product's tokens stay sharded over cp; the
sum's are sharded over both again, forward and backward. The compiled text shows that nothing is
gathered over cp.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch._text import say_once  # inner: warnings are said once in a process

B, T, D, F = 4, 64, 8, 16
B, T, D, F = 4, 64, 8, 16
AXES = ("data", "cp", "tp")
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
TOKENS, HIDDEN = P("data", ("cp", "tp")), P("data", "cp", "tp")
COLLECTIVES = r" (all-gather|all-to-all|reduce-scatter|collective-permute|all-reduce)(?:-start)?\("
RING: Any = {"method": "ring"}


@pytest.fixture(autouse=True)
def every_warning_is_said():
    say_once.cache_clear()


def mesh_of(sizes, kind="automatic", names=AXES):
    return jax.make_mesh(sizes, names, axis_types=(KINDS[kind],) * len(names))


def integers(rng, *shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


def put(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def operands(mesh, tokens=TOKENS, shape=(B, T)):
    """x, a column-sharded weight and its bias, a row-sharded weight and its bias, on the mesh."""
    rng = np.random.default_rng()
    plain = [
        integers(rng, *shape, D),
        integers(rng, D, F),
        integers(rng, F),
        integers(rng, F, D),
        integers(rng, D),
    ]
    specs = tokens, P(None, "tp"), P("tp"), P("tp", None), P()
    return plain, [put(mesh, x, spec) for x, spec in zip(plain, specs, strict=True)]


def up(x, w, b=None, **options):
    return all_gather_matmul(x, w, axis_name="tp", bias=b, **options)


def down(h, w, b=None, **options):
    return matmul_reduce_scatter(h, w, axis_name="tp", bias=b, **options)


def two_layers(x, w, b, w2, b2, **options):
    rest = {name: value for name, value in options.items() if name != "gathered"}
    return down(up(x, w, b, **options), w2, b2, **rest)


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


def split_as(array, spec):
    """Whether a result is sharded by this spec, ignoring axes of one device."""
    want = NamedSharding(array.sharding.mesh, spec)
    return array.sharding.is_equivalent_to(want, array.ndim)


# ---- Tokens keep their other axes.


@pytest.mark.parametrize("sizes, kind", [((2, 2, 2), "explicit"), ((1, 2, 4), "automatic")])
def test_each_layer_keeps_tokens_on_their_other_axes(kind, sizes):
    mesh = mesh_of(sizes, kind)
    (x, w, b, w2, b2), placed = operands(mesh)
    h = x @ w + b
    with jax.set_mesh(mesh):
        out, found = run(functools.partial(up, method="ring"), *placed[:3])
        np.testing.assert_array_equal(out, h)
        assert split_as(out, HIDDEN) and not found
        hidden = put(mesh, h, HIDDEN)
        out, found = run(functools.partial(down, method="ring"), hidden, *placed[3:])
        np.testing.assert_array_equal(out, h @ w2 + b2)
        assert split_as(out, TOKENS) and not found


@pytest.mark.parametrize("kind, gathered", [("explicit", "keep"), ("automatic", "again")])
def test_gradients_of_two_layers(kind, gathered):
    """dx is sharded as x; weight gradients are summed over data and cp; nothing else moves."""
    mesh = mesh_of((2, 2, 2), kind)
    plain, placed = operands(mesh)
    dy = integers(np.random.default_rng(), B, T, D)
    layers = functools.partial(two_layers, method="ring", gathered=gathered)

    def loss_and_output(dy, *arrays):
        out = layers(*arrays)
        return (out * dy).sum(), out

    gradients: Any = jax.grad(loss_and_output, range(1, 6), has_aux=True)
    with jax.set_mesh(mesh):
        (got, out), found = run(gradients, put(mesh, dy, TOKENS), *placed)
    np.testing.assert_array_equal(out, dense_two_layers(*plain))
    assert split_as(out, TOKENS) and split_as(got[0], TOKENS) and found == {"all-reduce"}
    for gradient, want in zip(got, dense_gradients(plain, dy), strict=True):
        np.testing.assert_array_equal(gradient, want)


def test_blocks_in_a_loop():
    """A residual stream and its gradient keep their sharding in `lax.scan`."""
    mesh = mesh_of((1, 4, 2))
    (x, w, b, w2, b2), placed = operands(mesh)

    def sum_of_blocks(x, *weights):
        block = lambda x, _: (x + 0.25 * two_layers(jnp.tanh(x), *weights, method="ring"), None)
        out, _ = jax.lax.scan(block, x, None, length=2)
        return out.sum(), out

    with jax.set_mesh(mesh):
        (dx, out), found = run(jax.grad(sum_of_blocks, has_aux=True), *placed)
    want = x
    for _ in range(2):
        want = want + 0.25 * dense_two_layers(np.tanh(want), w, b, w2, b2)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
    assert split_as(out, TOKENS) and split_as(dx, TOKENS) and found <= {"all-reduce"}


def test_several_batch_dimensions():
    """Each keeps its axes; tokens may be sharded over several other axes."""
    mesh = mesh_of((2, 2, 2))
    plain, placed = operands(mesh, P(None, "data", ("cp", "tp")), shape=(3, 2, T))
    with jax.set_mesh(mesh):
        out, found = run(functools.partial(two_layers, method="ring"), *placed)
    np.testing.assert_array_equal(out, dense_two_layers(*plain))
    assert split_as(out, P(None, "data", ("cp", "tp"))) and not found
    plain, placed = operands(mesh, P(("data", "cp", "tp")), shape=(T,))
    with jax.set_mesh(mesh):
        out, found = run(functools.partial(two_layers, method="ring"), *placed)
    np.testing.assert_array_equal(out, dense_two_layers(*plain))
    assert split_as(out, P(("data", "cp", "tp"))) and not found


def test_tokens_over_the_other_axis_alone_end_up_sharded_over_both():
    mesh = mesh_of((1, 4, 2))
    plain, placed = operands(mesh, P("data", "cp"))
    out, found = run(functools.partial(two_layers, method="ring", mesh=mesh), *placed)
    np.testing.assert_array_equal(out, dense_two_layers(*plain))
    assert split_as(out, TOKENS) and "all-gather" not in found


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_axis_first(kind):
    """Tokens over ("tp", "cp") are not adjacent within a group of ranks.

    With explicit axes they are moved. With automatic axes XLA gathers them, with a warning.
    """
    mesh = mesh_of((1, 4, 2), kind)
    plain, placed = operands(mesh, P("data", ("tp", "cp")))
    run_up = lambda: run(functools.partial(up, method="ring"), *placed[:3])
    with jax.set_mesh(mesh):
        if kind == "explicit":
            out, found = run_up()
            assert split_as(out, HIDDEN) and "all-gather" not in found
        else:
            with pytest.warns(UserWarning, match="Call inside jax.shard_map, reshape tokens"):
                out, _ = run_up()
    np.testing.assert_array_equal(out, plain[0] @ plain[1] + plain[2])


def test_tokens_that_do_not_divide_among_all_devices():
    """12 tokens are a multiple of 4 ranks of cp, but not of 8 devices: a warning, and a gather."""
    mesh = mesh_of((1, 4, 2))
    plain, placed = operands(mesh, P("data", "cp"), shape=(B, 12))
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="12 tokens are not a multiple of 8"):
        out, _ = run(functools.partial(two_layers, method="ring"), *placed)
    np.testing.assert_array_equal(out, dense_two_layers(*plain))


def test_no_warning_for_other_tokens(recwarn):
    mesh = mesh_of((4, 2), names=("data", "tp"))
    plain, placed = operands(mesh, P("data", "tp"))
    out, found = run(functools.partial(up, method="ring", mesh=mesh), *placed[:3])
    np.testing.assert_array_equal(out, plain[0] @ plain[1] + plain[2])
    assert split_as(out, P("data", None, "tp")) and not found
    assert not [w for w in recwarn if "tokens are split" in str(w.message)]


# ---- Two layers of a batch over another axis equal dense ones.

OTHER_WAYS = {
    "tokens that do not divide": (7, AxisType.Auto, {"gathered": "again"}),
    "explicit axes": (8, AxisType.Explicit, {}),
    "an explicit axis around the ranks": (8, (AxisType.Explicit, AxisType.Auto), {}),
    "XLA without custom_partitioning, as on TPUs": (
        *(8, AxisType.Auto),
        {"implementation": "xla", "deadline": 59.0},
    ),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_two_layers_and_their_gradients_equal_dense_ones(way, monkeypatch):
    rows, kinds, options = OTHER_WAYS[way]
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=kinds)
    plain, placed = operands(mesh, P("data", "tp") if rows == 8 else P("data"), shape=(B, rows))
    layers = functools.partial(two_layers, method="ring", **options)
    if way.startswith("XLA"):
        text = jax.jit(layers).trace(*placed).lower(lowering_platforms=("tpu",)).as_text()
        assert "manual_computation" in text and "CustomSPMDPartitioning" not in text
        # The deadline is that of no other program, so that JAX lowers this one anew.
        can_partition = "jax_cp_dispatch._ranks.partitioned.can_partition"
        monkeypatch.setattr(can_partition, lambda ctx: False)
    if "around" in way:
        specs = P(None, "tp"), P(None, "tp"), P("tp"), P("tp"), P()
        layers = jax.shard_map(layers, in_specs=specs, out_specs=P(None, "tp"), axis_names={"tp"})
    dy = integers(np.random.default_rng(), B, rows, D)

    def both(*arrays):
        out, pull = jax.vjp(layers, *arrays)
        like = jax.typeof(out).sharding
        is_typed = AxisType.Explicit in like.mesh.axis_types
        return out, pull(jax.sharding.reshard(dy, like) if is_typed else jnp.asarray(dy))

    with jax.set_mesh(mesh):
        out, gradients = jax.jit(both)(*placed)
    np.testing.assert_array_equal(out, dense_two_layers(*plain))
    if rows == 8 and "around" not in way:
        assert split_as(out, P("data", "tp"))
    for got, want in zip(gradients, dense_gradients(plain, dy), strict=True):
        np.testing.assert_array_equal(got, want)


def test_without_jit_the_arrays_determine_the_mesh():
    """Of tokens that do not divide."""
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(AxisType.Explicit,) * 2)
    plain, placed = operands(mesh, P("data"), shape=(B, 7))
    out = two_layers(*placed, method="ring")
    np.testing.assert_array_equal(out, dense_two_layers(*plain))


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
    loss = lambda x, w, dy: (mapped(x, w) * dy).sum()
    placed = [put(mesh, a, spec) for a, spec in zip((x, w, dy), places, strict=True)]
    with jax.set_mesh(mesh):
        both = jax.jit(lambda *a: (mapped(*a[:2]), *jax.grad(loss, (0, 1))(*a)))
        out, dx, dw = both(*placed)
    each = w[:, None] if has_weights else w
    of_w = np.einsum("sbtk,sbtn->skn", x, dy)
    wants = x @ each, dy @ np.swapaxes(each, -1, -2), of_w if has_weights else of_w.sum(0)
    for got, want in zip((out, dx, dw), wants, strict=True):
        np.testing.assert_array_equal(got, want)
    return zip((out, dx, dw), (places[2], *places[:2]), strict=True)


@pytest.mark.parametrize(
    "op, has_weights", [(all_gather_matmul, False), (matmul_reduce_scatter, True)]
)
def test_stages_around_shard_map(op, has_weights):
    mesh, (of_x, of_w, of_out) = stages(), SPECS[op]
    local = functools.partial(op, axis_name="tp", method="ring")
    # JAX's check of varying axes fails for any custom derivative under spmd_axis_name.
    each = jax.shard_map(local, mesh=mesh, in_specs=(of_x, of_w), out_specs=of_out, check_vma=False)
    check(each, has_weights, "stage", mesh, op)


@pytest.mark.parametrize(
    "op, options, has_weights, spmd",
    [
        (all_gather_matmul, {}, True, "stage"),
        (all_gather_matmul, {"gathered": "again"}, False, "stage"),
        (matmul_reduce_scatter, {}, False, None),
    ],
)
def test_stages_of_global_arrays(op, options, has_weights, spmd):
    """Each stage's devices compute their own examples; results are sharded like the operands."""
    mesh = stages()
    fn = functools.partial(op, axis_name="tp", method="ring", mesh=mesh, **options)
    for array, spec in check(fn, has_weights, spmd, mesh, op):
        assert split_as(array, spec)


def test_stages_over_explicit_axes():
    op = all_gather_matmul
    call = functools.partial(op, axis_name="tp", method="ring")
    check(call, True, None, stages("explicit"), op)
    with pytest.raises(ValueError, match=r"^all_gather_matmul: .*explicit mesh axis 'stage'.*Auto"):
        check(call, True, "stage", stages("explicit"), op)


def test_two_vmaps_on_global_arrays():
    rng = np.random.default_rng()
    x, w, b = integers(rng, 2, 3, 2, ROWS, 4), integers(rng, 2, 3, 4, 8), integers(rng, 3, 8)
    call = functools.partial(up, method="ring", mesh=stages())
    out = jax.jit(jax.vmap(jax.vmap(call), in_axes=(0, 0, None)))(x, w, b)
    np.testing.assert_array_equal(out, x @ w[:, :, None] + b[:, None, None])
