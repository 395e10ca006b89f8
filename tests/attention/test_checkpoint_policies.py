"""What policies of `jax.checkpoint` keep of attention in scanned layers, and what runs again.

Counted in the jaxpr of the gradient; docs/trainers.md has the same numbers.
"""

import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import flattened, runs
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "trainers.md"
W, LAYERS, COLUMNS, N, K, H = 4, 3, 64, 2, 1, 8
SEGMENT_IDS = np.repeat([1, 2, 3, 0], [20, 30, 10, 4])[None]
PACKED = cpd.Documents(SEGMENT_IDS)
DOCUMENTS = {
    "placed": cpd.place_tokens(segment_ids=SEGMENT_IDS, world_size=W).documents,
    "balanced": PACKED.with_plan(cpd.plan_attention(SEGMENT_IDS, world_size=W)),
    **dict.fromkeys(("ring", "zigzag", "hamilton"), PACKED),
}
ROWS = COLUMNS // W

only = jax.checkpoint_policies.save_only_these_names
NAMES = ["context", "context_received"]
POLICIES = {
    "no `jax.checkpoint`": lambda layer: layer,
    "`jax.checkpoint(layer)`": jax.checkpoint,
    '`"context"`': partial(jax.checkpoint, policy=only("context")),
    '`"context"`, `"context_received"`': partial(jax.checkpoint, policy=only(*NAMES)),
}
offload = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=NAMES, offload_src="device",
    offload_dst="pinned_host",
)  # fmt: skip
OFFLOADED = partial(jax.checkpoint, policy=offload)

of_all = partial(cpd.context_parallel_attention, mesh=mesh_of(W), axis_name=AXIS)
GLOBAL = {
    name: partial(of_all, algorithm=name, documents=documents)
    for name, documents in DOCUMENTS.items()
}


def one_layer(attend, x, w):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, each) for each in w[:3])
    return x + jnp.einsum("btnh,nhd->btd", attend(q, k, v), w[3])


def loss(attend, checkpoint, w, x):
    layer = checkpoint(lambda x, w: (one_layer(attend, x, w), None))
    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


def gradient(attend, checkpoint):
    """Of all layers' weights."""
    return jax.grad(partial(loss, attend, checkpoint))


def gradient_on_ranks(algorithm, checkpoint):
    """The same; the layers themselves are inside of a shard_map."""
    documents = DOCUMENTS[algorithm]
    call = partial(cpd.context_parallel_attention, algorithm=algorithm, axis_name=AXIS)
    run = jax.shard_map(
        lambda w, x, documents: gradient(partial(call, documents=documents), checkpoint)(w, x),
        mesh=mesh_of(W), in_specs=(P(), P(None, AXIS), documents.specs(AXIS)), out_specs=P(),
    )  # fmt: skip
    return lambda w, x: run(w, x, documents)


def weights_and_tokens():
    rng = np.random.default_rng(0)
    shapes = [(N * H, N, H), (N * H, K, H), (N * H, K, H), (N, H, N * H)]
    w = [rng.normal(size=(LAYERS, *shape)).astype(np.float32) / 4 for shape in shapes]
    return w, rng.normal(size=(1, COLUMNS, N * H)).astype(np.float32)


def counts(program, *operands, gathers=0):
    """Exchanges, and forward passes of attention over all keys, of one layer.

    `gathers`: exchanges before the loop over layers, which gather the segment ids of all layers.
    """
    count = runs(jax.make_jaxpr(program)(*operands).jaxpr)
    exchanges = count["dispatch"] + count["combine"]
    attention = count["attend_blocks"] + count["local_attention"]
    assert (exchanges % LAYERS, attention % LAYERS) == (gathers, 0)
    return exchanges // LAYERS, attention // LAYERS


@pytest.mark.parametrize("policy", POLICIES)
def test_what_runs_again(policy):
    """The row of the page's table; JAX treats a name alike everywhere, so offloaded is as kept."""
    page, checkpoint, exchanges, attention = PAGE.read_text(), POLICIES[policy], [], set()
    assert "| policy | attention | `placed` | `balanced` | `ring` | `zigzag`, `hamilton` |" in page
    for algorithm in ("placed", "balanced", "ring", "zigzag"):
        rotates = algorithm in ("ring", "zigzag")
        of_layers = partial(gradient, GLOBAL[algorithm])
        if algorithm == "balanced":
            of_layers = partial(gradient_on_ranks, algorithm)
        found = counts(of_layers(checkpoint), *weights_and_tokens(), gathers=int(rotates))
        exchanges.append(str(found[0]))
        attention.add(found[1] // (W if rotates else 1))
        if "context_received" in policy and algorithm in ("placed", "ring"):
            kept = counts(of_layers(OFFLOADED), *weights_and_tokens(), gathers=int(rotates))
            assert kept == found
    assert len(attention) == 1
    assert f"| {' | '.join([policy, *map(str, attention), *exchanges])} |" in page


def test_plan_of_a_layer_is_kept():
    """A plan that the layer makes itself is made again, unless it is kept."""
    attend = partial(of_all, algorithm="balanced", batch_axis=(), head_axis=())
    for policy, num_plans in (("`jax.checkpoint(layer)`", 2), ('`"context"`', 1)):
        program = lambda w, x, ids, policy=policy: gradient(
            partial(attend, segment_ids=ids), POLICIES[policy]
        )(w, x)
        equations = flattened(jax.make_jaxpr(program)(*weights_and_tokens(), SEGMENT_IDS).jaxpr)
        dispatched = [e.outvars[0].aval for e in equations if e.primitive.name == "dispatch"]
        of_ids = [x for x in dispatched if jnp.issubdtype(x.dtype, jnp.integer)]
        assert len(of_ids) == num_plans, policy


def test_bytes_kept():
    """Per rank and layer; float32 where it says so. Ranges replace a plan's 3 x 8 + 1 runs."""
    w, x = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), weights_and_tokens())

    def kept(attend, policy):
        layer = POLICIES[policy](partial(one_layer, attend))
        pull = jax.eval_shape(lambda *x: jax.vjp(layer, *x)[1], x, [each[0] for each in w])
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    def named(attend):
        """Bytes per rank of "context", and of "context_received"."""
        _, nothing, context, both = (kept(attend, policy) for policy in POLICIES)
        return (context - nothing) / W, (both - context) / W

    out, lse, ranges, runs = 2 * ROWS * N * H, 4 * ROWS * N, 8 * ROWS, 4 * (3 * 8 + 1)
    qkv = 2 * ROWS * (N + 2 * K) * H
    received = lambda capacity, heads: 2 * capacity * heads * H
    placed, moved = (DOCUMENTS[name].plan for name in ("placed", "balanced"))
    keys = received(placed.kv_capacity, 2 * K)
    assert named(GLOBAL["placed"]) == (out + lse + ranges - runs, keys)
    computed = moved.q_capacity / ROWS
    keys = received(moved.kv_capacity, 2 * K)
    assert named(GLOBAL["balanced"]) == (
        out + computed * (out + lse + ranges) - runs,
        received(moved.q_capacity, N) + keys,
    )
    ranges -= 4 * ROWS  # the segment ids, from which they are made, are no longer needed
    assert named(GLOBAL["zigzag"]) == (3 * out + lse + ranges + qkv, 0)


def test_local_attention():
    """Of a step of one's own: no second forward pass if its results are kept."""
    ranges = jnp.zeros((1, COLUMNS), jnp.int32), jnp.arange(1, COLUMNS + 1)[None]
    attend = lambda q, k, v: cpd.local_attention(q, k, v, *ranges)[0]
    for policy, passes in zip(POLICIES, (1, 2, 1, 1), strict=True):
        program = gradient(attend, POLICIES[policy])
        assert counts(program, *weights_and_tokens()) == (0, passes), policy
