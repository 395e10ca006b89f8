"""GEMMs of global arrays under plain `jit`: automatic and explicit axes, batches, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch._ranks import partitioned

B, S, K, N = 4, 8, 12, 8


def devices(dp, tp, permuted=False):
    found = np.array(jax.devices()[: dp * tp])
    return (found[::-1] if permuted else found).reshape(dp, tp)


def explicit(dp, tp):
    return jax.make_mesh((dp, tp), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)


def integers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def operands(rows):
    return (
        integers(0, B, rows, K),
        integers(1, K, N),
        integers(2, N),
        integers(3, N, K),
        integers(4, K),
    )


def placed(mesh, arrays, rows):
    of_tokens = P("dp") if rows % mesh.shape["tp"] else P("dp", "tp")
    specs = of_tokens, P(None, "tp"), P("tp"), P("tp"), P()
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return [put(x, spec) for x, spec in zip(arrays, specs, strict=True)]


def two_layers(mesh, **options):
    def layers(x, w, b, w2, b2):
        h = all_gather_matmul(x, w, axis_name="tp", bias=b, mesh=mesh, **options)
        both = {name: value for name, value in options.items() if name != "gathered"}
        return matmul_reduce_scatter(h, w2, axis_name="tp", bias=b2, mesh=mesh, **both)

    return layers


def dense(x, w, b, w2, b2):
    return (x @ w + b) @ w2 + b2


MESHES = {
    "automatic axes": lambda: Mesh(devices(2, 4), ("dp", "tp")),
    "permuted devices": lambda: Mesh(devices(2, 4, permuted=True), ("dp", "tp")),
    "no other ranks": lambda: Mesh(devices(8, 1), ("dp", "tp")),
    "explicit axes": lambda: explicit(2, 4),
}


@pytest.mark.parametrize(
    "name, rows, gathered",
    [
        ("automatic axes", S, "keep"),
        ("permuted devices", 7, "again"),
        ("no other ranks", S, "again"),
        ("explicit axes", S, "keep"),
        ("explicit axes", 7, "again"),
    ],
)
def test_two_layers_and_their_gradients_equal_dense_ones(name, rows, gathered):
    """Includes tokens that do not divide, and tokens gathered again for the derivative."""
    mesh = MESHES[name]()
    arrays = [
        jnp.concatenate([x] * 2) if i == 0 and name == "no other ranks" else x
        for i, x in enumerate(operands(rows))
    ]
    sharded = placed(mesh, arrays, rows)
    loss = lambda fn: lambda *arrays: (fn(*arrays) ** 2).sum() * 1e-4
    layers = two_layers(mesh, method="ring", gathered=gathered)
    out, grads = jax.jit(lambda *a: (layers(*a), jax.grad(loss(layers), range(5))(*a)))(*sharded)
    np.testing.assert_array_equal(out, dense(*arrays))
    if rows % mesh.shape["tp"] == 0:
        wanted = NamedSharding(mesh, P("dp", "tp"))
        assert out.sharding.is_equivalent_to(wanted, out.ndim)
    for got, want in zip(grads, jax.grad(loss(dense), range(5))(*arrays), strict=True):
        largest = np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * largest)


def test_an_explicit_axis_shards_the_batch_of_a_rank():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit, AxisType.Auto))
    arrays = operands(S)
    specs = P(None, "tp"), P(None, "tp"), P("tp"), P("tp"), P()
    layers = jax.shard_map(
        two_layers(None, method="ring"),
        in_specs=specs,
        out_specs=P(None, "tp"),
        axis_names={"tp"},
    )
    with jax.set_mesh(mesh):
        loss = lambda *a: (layers(*a) ** 2).sum() * 1e-4
        run = jax.jit(lambda *a: (layers(*a), jax.grad(loss, range(5))(*a)))
        out, grads = run(*placed(mesh, arrays, S))
    np.testing.assert_array_equal(out, dense(*arrays))
    loss = lambda *arrays: (dense(*arrays) ** 2).sum() * 1e-4
    for got, want in zip(grads, jax.grad(loss, range(5))(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_xla_communicates_only_over_the_batch_axis():
    mesh = Mesh(devices(2, 4), ("dp", "tp"))
    sharded = placed(mesh, operands(S), S)
    layers = two_layers(mesh, method="ring")
    forward = jax.jit(layers).lower(*sharded).compile().as_text() or ""
    for collective in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute("):
        assert collective not in forward
    loss = lambda *a: layers(*a).sum()
    both = jax.jit(jax.grad(loss, (0, 1, 3))).lower(*sharded).compile().as_text() or ""
    assert "all-gather" not in both and "reduce-scatter" not in both
    assert "all-reduce" in both  # of weight gradients, over dp


def test_on_tpus_a_shard_map_takes_the_place_of_the_rule(monkeypatch):
    """Their XLA lacks `custom_partitioning`."""
    mesh = Mesh(devices(2, 4), ("dp", "tp"))
    layers, arrays = two_layers(mesh, implementation="xla"), operands(S)
    loss = lambda fn: lambda *a: (fn(*a) ** 2).sum() * 1e-4
    grads = jax.jit(jax.grad(loss(layers), range(5)))
    sharded = placed(mesh, arrays, S)
    text = jax.jit(layers).trace(*sharded).lower(lowering_platforms=("tpu",)).as_text()
    assert "manual_computation" in text and "CustomSPMDPartitioning" not in text
    monkeypatch.setattr(partitioned, "can_partition", lambda ctx: False)
    jax.clear_caches()
    for got, want in zip(grads(*sharded), jax.grad(loss(dense), range(5))(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    jax.clear_caches()


def test_tokens_that_do_not_divide_without_jit():
    mesh, rows = MESHES["explicit axes"](), 7
    arrays = operands(rows)
    out = two_layers(mesh, method="ring")(*placed(mesh, arrays, rows))
    np.testing.assert_array_equal(out, dense(*arrays))


def test_mesh_from_the_context_and_from_the_arrays():
    mesh = Mesh(devices(2, 4), ("dp", "tp"))
    x, w, *_ = placed(mesh, operands(S), S)
    want = np.asarray(operands(S)[0] @ operands(S)[1])
    np.testing.assert_array_equal(all_gather_matmul(x, w, axis_name="tp", method="ring"), want)
    with jax.set_mesh(mesh):
        product = jax.jit(lambda x, w: all_gather_matmul(x, w, axis_name="tp", method="ring"))
        np.testing.assert_array_equal(product(x, w), want)
        unplaced = np.asarray(x), np.asarray(w)
        np.testing.assert_array_equal(product(*unplaced), want)
