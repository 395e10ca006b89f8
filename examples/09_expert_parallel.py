"""A hybrid model with experts: context and expert parallelism on 8 devices, data x context.

Twice attention beside linear attention over placed documents, and experts spread over all devices.
Training equals one device that computes documents alone, every expert on every token. In processes:

    python -m jax_cp_dispatch.launch --processes 4 --devices 2 examples/09_expert_parallel.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch import experts, sequence
from jax_cp_dispatch.cpu_devices import start_cpu_devices

if cpd.initialize().implementation == "in_process":  # not one of several processes
    start_cpu_devices(8)

GROUPS, RANKS = 2, 4  # of the mesh: each group of ranks has a row of the batch
ALL = "data", "cp"  # the mesh axes; experts are spread over both
LENGTHS = [[60, 40, 1, 27], [100, 25, 3]]  # of the documents in each row
COLUMNS, VOCAB, WIDTH, HEADS, HIDDEN, STEPS, RATE = 128, 64, 32, 2, 48, 20, 0.1
NUM_EXPERTS, CHOSEN = 16, 2


def weights():
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)
    layers = {"qkv": draw(2, WIDTH, 3 * WIDTH), "out": draw(2, WIDTH, WIDTH)}
    layers |= {"router": draw(2, WIDTH, NUM_EXPERTS), "up": draw(2, NUM_EXPERTS, WIDTH, HIDDEN)}
    layers["down"] = draw(2, NUM_EXPERTS, HIDDEN, WIDTH)
    return {"embed": draw(VOCAB, WIDTH) * 2, "layers": layers}


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 0.1)


def hybrid_layer(mesh, documents, x, w):
    """Heads of attention beside heads with a state that decays, as in Hymba."""
    heads = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, WIDTH // HEADS)
    qkv, decay = jnp.split(heads, 3, axis=2), jnp.full((*x.shape[:2], HEADS), -0.1)
    given = {"documents": documents, "mesh": mesh, "axis_name": "cp", "batch_axis": "data"}
    algorithm = "zigzag" if documents.plan is None else "placed"
    out = cpd.context_parallel_attention(*qkv, algorithm=algorithm, head_axis=(), **given)
    out += sequence.linear_attention(*qkv, log_decay=decay, scale=0.1, head_axis=(), **given)
    return x + out.reshape(x.shape) @ w["out"]


choose = lambda tokens, router: jax.lax.top_k(jax.nn.softmax(tokens @ router), CHOSEN)


def experts_of_rank(x, router, up, down):
    """The layer of one rank: its tokens go to their experts, on all devices, and come back."""
    shares, index = choose(tokens := x.reshape(-1, WIDTH), router)
    routing = experts.route(index, num_experts=NUM_EXPERTS, axis_name=ALL)
    rows = experts.dispatch_tokens(tokens, routing)
    hidden = jax.nn.gelu(cpd.grouped_gemm(rows, up, routing.group_sizes))
    rows = cpd.grouped_gemm(hidden, down, routing.group_sizes)
    return experts.combine_tokens(rows, shares, routing).reshape(x.shape)


def every_expert(x, router, up, down):
    """The same on one device: every expert computes every token."""
    shares, index = choose(x, router)
    hidden = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, up))
    out = jnp.einsum("bteh,ehd->bted", hidden, down)
    return jnp.einsum("btk,btkd->btd", shares, jnp.take_along_axis(out, index[..., None], 2))


def train(devices, tokens, documents):
    """Returns the loss of each step."""
    mesh, params = Mesh(np.array(devices), ALL), weights()
    rows, of_experts = P(*ALL), {"up": P(None, ALL), "down": P(None, ALL)}
    layers = {name: of_experts.get(name, P()) for name in params["layers"]}
    specs = {"embed": P(), "layers": layers}, rows, documents.specs("cp", batch_axis="data")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params, tokens, documents = jax.device_put((params, tokens, documents), shardings)
    given = {"mesh": mesh, "in_specs": (rows, P(), P(ALL), P(ALL)), "out_specs": rows}
    expert_layer = jax.shard_map(experts_of_rank, **given) if mesh.size > 1 else every_expert

    def loss(params, tokens, documents):
        def layer(x, w):
            x = hybrid_layer(mesh, documents, x, w)
            return x + expert_layer(norm(x), w["router"], w["up"], w["down"]), None

        x = jax.lax.scan(layer, params["embed"][tokens["token"]], params["layers"])[0]
        log_p, label = jax.nn.log_softmax(norm(x) @ params["embed"].T), tokens["label"]
        log_p = jnp.take_along_axis(log_p, jnp.maximum(label, 0)[..., None], -1)[..., 0]
        return -jnp.where(label >= 0, log_p, 0).sum() / (GROUPS * COLUMNS)

    @jax.jit
    def step(params, tokens, documents):
        value, gradients = jax.value_and_grad(loss)(params, tokens, documents)
        return value, jax.tree.map(lambda w, g: w - RATE * g, params, gradients)

    losses = np.zeros(STEPS)
    for i in range(STEPS):
        losses[i], params = step(params, tokens, documents)
    return losses


ids = np.stack([np.repeat(np.arange(1, 1 + len(row)), row) for row in LENGTHS])
token = np.random.default_rng(1).integers(0, VOCAB, ids.shape)
label = sequence.shift_documents(token, -1, documents=cpd.Documents(ids), fill=-1)
placement = cpd.place_tokens(segment_ids=ids, world_size=RANKS, num_groups=GROUPS)
batch = placement.apply({"token": token, "label": label})
devices = np.array(jax.devices()).reshape(GROUPS, RANKS)
placed = train(devices, batch, placement.documents)

lengths = np.concatenate(LENGTHS)
of_row = np.arange(lengths.max()) < lengths[:, None]  # each document in a row of its own
alone = {"token": np.zeros(of_row.shape, int), "label": np.full(of_row.shape, -1)}
alone["token"][of_row], alone["label"][of_row] = token.ravel(), label.ravel()
one = train([jax.local_devices()[:1]], alone, cpd.Documents(of_row.astype(np.int32)))
np.testing.assert_allclose(placed, one, rtol=1e-4)
if jax.process_index() == 0:
    print(f"loss {one[0]:.3f} -> {one[-1]:.3f}, 2 x 4 devices equal one: verified")
