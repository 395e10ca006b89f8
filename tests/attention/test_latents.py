"""Latent rows, which each rank expands to keys and values.

Values: test_values.py, and over several axes test_mesh_axes.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import Call, dense, draw_operands, errors
from jax.sharding import PartitionSpec as P
from jaxprs import flattened
from on_mesh import AXIS, mesh_of, permuted_mesh

from jax_cp_dispatch import Ring, Ulysses, context_parallel_attention, place_tokens

N, H, HV = 4, 12, 8


@pytest.mark.parametrize("algorithm", ["balanced", "ring"])  # a plan, and rotating rows
def test_quantised_rows_and_positions_are_expanded_by_the_receiver(algorithm):
    """4 ranks, tokens that they do not divide; integers move and have no gradient; sinks, lse."""
    rng, T, K = np.random.default_rng(), 61, 2
    call = Call(algorithm, 4, heads=(N, K), features=(H, H), sink=True, returns=("lse",))
    operands, (g, dlse) = draw_operands(call, rng, (1, T))
    q, sink = operands["q"], operands["sink"]
    scale = rng.uniform(0.01, 0.02, size=(1, T)).astype(np.float32)
    data = rng.integers(-127, 128, size=(1, T, K, H), dtype=np.int8)
    rows = {"data": data, "scale": scale, "position": np.arange(T, dtype=np.int32)[None]}

    def dequantised(_, rows):
        k = rows["data"] * rows["scale"][:, None, None]
        return k * jnp.cos(rows["position"])[:, None, None], k

    def loss(q, sink, rows):
        out, lse = context_parallel_attention(
            *(q, rows), mesh=mesh_of(4), axis_name=AXIS, algorithm=algorithm, sink=sink,
            return_lse=True, expand=dequantised,
        )  # fmt: skip
        return (out * g).sum() + (lse * dlse).sum(), (out, lse)

    (dq, dsink), results = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(q, sink, rows)
    keys = tuple(np.asarray(x)[None] for x in dequantised(None, jax.tree.map(lambda x: x[0], rows)))
    pairs = np.tri(T, dtype=bool)[None]
    out, lse, _, wanted = dense(call, operands | {"keys": keys}, pairs, (g, dlse))
    found = errors(call, (results, dq, dsink), ((out, lse), wanted["q"], wanted["sink"]))
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("algorithm", ["placed", "ring"])
def test_a_layer_of_deepseek_v3_moves_a_sixtieth_of_the_bytes(algorithm):
    """512 + 64 numbers in place of 128 x (192 + 128), forward and backward."""
    N, T = 128, 16
    documents = None
    if algorithm == "placed":
        documents = place_tokens([[5 * T, 3 * T]], world_size=8).documents
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q, *rows = (of(1, 8 * T, *features) for features in ((N, 192), (512,), (64,)))

    def project(w, rows):
        latent, rope = rows
        k = jnp.einsum("rl,lnh->rnh", latent, w[0])
        rope = jnp.broadcast_to(rope[:, None], (*k.shape[:2], 64))
        return jnp.concatenate([k, rope], -1), jnp.einsum("rl,lnh->rnh", latent, w[1])

    def loss(q, rows, w):
        out = context_parallel_attention(
            *(q, rows), mesh=mesh_of(8), axis_name=AXIS, algorithm=algorithm, documents=documents,
            expand=project, weights=w,
        )  # fmt: skip
        return out.astype(jnp.float32).sum()

    traced = jax.make_jaxpr(jax.grad(loss, argnums=1))(q, tuple(rows), (of(512, N, 128),) * 2)
    moved = ("dispatch", "combine")
    exchanges = [x for x in flattened(traced.jaxpr) if x.primitive.name in moved]
    assert len(exchanges) >= 2
    for exchange in exchanges:
        assert sorted(x.aval.shape[-1] for x in exchange.outvars) == [64, 512]


def test_ulysses_gathers_rows_and_expands_a_share_of_the_heads():
    """8 ranks: each receives all rows once, and has weights of 2 of 16 heads; sums are float32."""
    N, H, T, W, LATENT = 16, 16, 4, 8, 6
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    weights, rows = of(LATENT, N, H), of(1, W * T, LATENT)

    def loss(q, rows, weights):
        out = context_parallel_attention(
            *(q, rows), expand=lambda w, x: (jnp.einsum("rl,lnh->rnh", x, w),) * 2,
            weights=weights, weight_specs=P(None, AXIS), mesh=mesh_of(W), axis_name=AXIS,
            batch_axis=(), head_axis=(), algorithm="ulysses",
        )  # fmt: skip
        return out.astype(jnp.float32).sum()

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(of(1, W * T, N, H), rows, weights)
    equations = list(flattened(traced.jaxpr))
    moved = {"dispatch": [], "combine": []}
    for equation in equations:
        if equation.primitive.name in moved:
            moved[equation.primitive.name] += [x.aval for x in equation.outvars]
    gathered = [x for x in moved["dispatch"] if LATENT in x.shape]
    assert [x.shape for x in gathered] == [(W, 1, T, 1, LATENT)]
    (summed,) = moved["combine"]
    assert summed.shape == (1, 1, T, 1, LATENT) and summed.dtype == jnp.float32
    of_heads = W, 1, T, N // W, H  # of q, of the output, of dout, of dq
    assert [x.shape for x in moved["dispatch"] if x not in gathered] == 4 * [of_heads]
    products = {x.aval.shape for e in equations if e.primitive.name == "dot_general"
                for x in e.invars}  # fmt: skip
    assert (LATENT, N // W, H) in products and weights.shape not in products


Q, ROWS = np.zeros((1, 16, N, H), np.float32), np.zeros((1, 16, 3), np.float32)


def keys(rows=16, size=H, heads=2):
    return lambda *_: (jnp.zeros((rows, heads, size)), jnp.zeros((rows, heads, HV)))


def of_heads(w, rows):
    return (jnp.zeros((len(rows), w.shape[1], H)),) * 2


OVER_HEADS = {
    "mesh": permuted_mesh((2, 2, 2), ("cp", "a", "b")), "head_axis": ("a", "b"), "batch_axis": (),
    "expand": of_heads, "weights": np.ones((3, N, 2), np.float32),
}  # fmt: skip
# Weights over the outer axis, which shards the sequence, so it cannot be head_axis.
TWO_LEVELS = {
    "mesh": permuted_mesh((2, 2), ("outer", "inner")), "axis_name": ("outer", "inner"),
    "algorithm": Ulysses(outer=Ring()), "weights": np.ones(4, np.float32),
}  # fmt: skip


@pytest.mark.parametrize(
    "given, error, says",
    [
        ({"v": Q, "expand": keys()}, TypeError, "got v with expand. Pass latent rows in place of"),
        ({"expand": 3}, TypeError, "expand is of type int. Pass a function"),
        ({"expand": None}, TypeError, "v is missing. Pass k and v, latent rows with expand=, or"),
        ({"k": Q, "v": Q, "weights": ROWS, "expand": None}, TypeError, "weight_specs without exp"),
        ({"expand": lambda w, x: x}, TypeError, "expand returned .* it needs to return \\(k, v"),
        ({"expand": keys(rows=8)}, ValueError, "R = 16 rows. Each row is expanded alone"),
        ({"expand": keys(size=5)}, ValueError, "it needs to return \\(k, v\\), \\[R, K, 12\\]"),
        ({"expand": keys(heads=3)}, ValueError, "K needs to divide the 4 query heads"),
        ({"weight_specs": P("tp")}, ValueError, "over \\(\\). Pass it as head"),
        ({"weight_specs": P(AXIS)}, ValueError, "over \\(\\). Remove it from"),
        ({"weight_specs": [P(), P()]}, ValueError, "does not match weights"),
        ({"weight_specs": "tp"}, TypeError, "a pytree of PartitionSpec"),
        *(
            ({"weight_specs": specs, **OVER_HEADS}, ValueError, says)
            for specs, says in [
                (P(None, "b"), "over \\('b',\\), but q is sharded by heads over \\('a', 'b'\\)"),
                (P(None, ("b", "a")), "Shard weights over the same axes in the same order"),
                (P(None, None, ("a", "b")), "shard a dimension of 2 .* over 4 devices"),
                (P(None, None, "a", None), "weights of shape \\[3, 4, 2\\]"),
                (P(None, None, "a"), "expand returns 4 heads of k and 4 of v .* needs to give 2"),
            ]
        ),
        ({"weight_specs": P("outer"), **TWO_LEVELS}, ValueError,
         "over axis 'outer', but heads are sharded over \\('inner',\\). Remove it from"),
    ],
)  # fmt: skip
def test_what_is_refused(given, error, says):
    weights = [np.ones(3, np.float32)] if "weight_specs" in given else None
    options = {"k": ROWS, "algorithm": "ring", "mesh": mesh_of(4), "axis_name": AXIS, **given}
    options = {"weights": weights, "expand": keys(), **options}
    with pytest.raises(error, match=f"^context_parallel_attention: .*{says}"):
        context_parallel_attention(Q, **options)


def test_a_traced_array_that_expand_closes_over_is_named():
    def loss(w):
        expand = lambda _, rows: (jnp.einsum("rl,lnh->rnh", rows, w),) * 2
        return context_parallel_attention(
            *(Q, ROWS), expand=expand, mesh=mesh_of(2), axis_name=AXIS, algorithm="ring"
        ).sum()

    with pytest.raises(ValueError, match=r"closes over a traced array of shape \[3, 4, 12\].*weig"):
        jax.eval_shape(jax.grad(loss), np.ones((3, N, H), np.float32))
