"""Overlapped GEMMs of global arrays with tokens sharded over context and tensor parallelism.

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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch._text import say_once

B, T, D, F = 4, 64, 8, 16
AXES = ("data", "cp", "tp")
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
TOKENS, HIDDEN = P("data", ("cp", "tp")), P("data", "cp", "tp")
COLLECTIVES = r" (all-gather|all-to-all|reduce-scatter|collective-permute|all-reduce)(?:-start)?\("


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


PAIRS = [((1, 4, 2), "automatic"), ((2, 2, 2), "explicit")]


@pytest.mark.parametrize("sizes, kind", [*PAIRS, ((1, 2, 4), "automatic")])
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


@pytest.mark.parametrize(
    "sizes, kind, gathered",
    [(*PAIRS[0], "keep"), (*PAIRS[1], "keep"), ((2, 2, 2), "automatic", "again")],
)
def test_gradients_of_two_layers(sizes, kind, gathered):
    """dx is sharded as x; weight gradients are summed over data and cp; nothing else moves."""
    mesh = mesh_of(sizes, kind)
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

    def blocks(x, *weights):
        block = lambda x, _: (x + 0.25 * two_layers(jnp.tanh(x), *weights, method="ring"), None)
        return jax.lax.scan(block, x, None, length=2)[0]

    with jax.set_mesh(mesh):
        out, found = run(blocks, *placed)
        dx, found_backward = run(jax.grad(lambda *a: blocks(*a).sum()), *placed)
    want = x
    for _ in range(2):
        want = want + 0.25 * dense_two_layers(np.tanh(want), w, b, w2, b2)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
    assert split_as(out, TOKENS) and not found
    assert split_as(dx, TOKENS) and found_backward <= {"all-reduce"}


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


def test_scaled_operands():
    mesh = mesh_of((1, 4, 2))
    (x, w, *_), placed = operands(mesh)
    scaled = functools.partial(up, method="ring", scaling_mode="CURRENT_TENSOR_SCALING", mesh=mesh)
    out, found = run(scaled, *placed[:2])
    np.testing.assert_array_equal(out, x @ w)  # these small integers are exact in 8 bits
    assert split_as(out, HIDDEN) and "all-gather" not in found


def test_mesh_from_argument_context_and_arrays():
    mesh = mesh_of((1, 4, 2))
    plain, placed = operands(mesh)
    want = dense_two_layers(*plain)
    layers = functools.partial(two_layers, method="ring")
    out, found = run(functools.partial(layers, mesh=mesh), *placed)
    np.testing.assert_array_equal(out, want)
    assert split_as(out, TOKENS) and not found
    out = layers(*placed)  # without jit, the arrays determine it
    np.testing.assert_array_equal(out, want)
    assert split_as(out, TOKENS)


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
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tp"))
    rng = np.random.default_rng()
    x, w = integers(rng, 4, T, D), integers(rng, D, F)
    placed = put(mesh, x, P("data", "tp")), put(mesh, w, P(None, "tp"))
    out, found = run(functools.partial(up, method="ring", mesh=mesh), *placed)
    np.testing.assert_array_equal(out, x @ w)
    assert split_as(out, P("data", None, "tp")) and not found
    assert not [w for w in recwarn if "tokens are split" in str(w.message)]
