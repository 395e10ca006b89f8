"""A model of DeepSeek-V3.2's kind: an index picks the keys of each query, over placed documents.

Absorbed latent attention and experts over 8 devices. First the index alone learns the weights of
dense attention. Then queries attend to the keys that they pick, and the whole model learns. Equal
to one device with all scores under a mask. In processes:
    python -m jax_cp_dispatch.launch --processes 4 --devices 2 examples/12_selected_keys.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch import experts, masks, selected
from jax_cp_dispatch.cpu_devices import start_cpu_devices

if cpd.initialize().implementation == "in_process":  # not one of several processes
    start_cpu_devices(8)

LENGTHS = [100, 30, 1, 125]  # of the documents; the first and the last are longer than a rank
COLUMNS, VOCAB, WIDTH, HIDDEN, NUM_EXPERTS, WARM_UP, STEPS, RATE = 256, 64, 32, 48, 16, 4, 4, 0.1
N, LATENT, VALUES, J, H, PICKED = 4, 24, 16, 4, 8, 16  # J heads of H in the index
SIZES = {"q": N * LATENT, "latent": LATENT, "router": NUM_EXPERTS}
SIZES |= {"index_q": J * H, "index_k": H, "index_w": J}
rng = np.random.default_rng(0)
draw = lambda *shape: (rng.normal(size=(2, *shape)) / shape[-2] ** 0.5).astype(np.float32)
LAYERS = {name: draw(WIDTH, size) for name, size in SIZES.items()}
LAYERS |= {"up": draw(NUM_EXPERTS, WIDTH, HIDDEN), "down": draw(NUM_EXPERTS, HIDDEN, WIDTH)}
LAYERS["out"] = draw(N * VALUES, WIDTH)
PARAMS = {"embed": 2 * draw(VOCAB, WIDTH)[0], "layers": LAYERS}
norm = lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 0.1)


def project(x, w):
    """Returns the index, of x without a gradient; queries; and latents."""
    heads, x0 = lambda y, number: y.reshape(*x.shape[:2], number, -1), jax.lax.stop_gradient(x)
    index = heads(x0 @ w["index_q"], J), x0 @ w["index_k"], x0 @ w["index_w"]
    return index, heads(x @ w["q"], N), heads(x @ w["latent"], 1)


def over_ranks(index, q, latent, is_sparse, where):
    mask = masks.Causal()
    if is_sparse:
        picks = selected.select_keys(*index, num_keys=PICKED, mask=mask, **where)
        mask = masks.Selected(picks, order=where["documents"].order)
    loss = selected.index_loss(*index, q=q, k=latent, mask=mask, **where)
    return cpd.context_parallel_attention(q, latent, value_size=VALUES, mask=mask, **where), loss


def dense(index, q, latent, is_sparse, where):
    """The same by all scores and a mask; each row has one document."""
    scores = jax.nn.relu(jnp.einsum("btjh,bsh->btsj", *index[:2]))
    t, scores = jnp.arange(q.shape[1]), jnp.einsum("btsj,btj->bts", scores, index[2])
    seen = jnp.broadcast_to(t <= t[:, None], scores.shape)
    if is_sparse:
        best = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), PICKED)[1]
        seen &= jax.nn.one_hot(best, len(t)).sum(2) > 0
    logits = jnp.einsum("btnl,bsl->bnts", q, latent[:, :, 0]) * LATENT**-0.5
    p = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf))
    target = jax.lax.stop_gradient(p.mean(1))
    log_index = jax.nn.log_softmax(jnp.where(seen, scores, -jnp.inf))
    loss = target * (jnp.log(jnp.maximum(target, 1e-30)) - jnp.where(seen, log_index, 0))
    return jnp.einsum("bnts,bsv->btnv", p, latent[:, :, 0, :VALUES]), loss.sum(-1)


def experts_of_rank(x, router, up, down):  # as in 09_expert_parallel.py
    shares, index = jax.lax.top_k(jax.nn.softmax((tokens := x.reshape(-1, WIDTH)) @ router), 2)
    routing = experts.route(index, num_experts=NUM_EXPERTS, axis_name="cp")
    rows = experts.dispatch_tokens(tokens, routing)
    hidden = jax.nn.gelu(cpd.grouped_gemm(rows, up, routing.group_sizes))
    rows = cpd.grouped_gemm(hidden, down, routing.group_sizes)
    return experts.combine_tokens(rows, shares, routing).reshape(x.shape)


def train(devices, attend, tokens, documents):
    """Yields the loss of each step, with that of the index."""
    mesh, rows = Mesh(np.array(devices), "cp"), P(None, "cp")
    where = {"mesh": mesh, "axis_name": "cp", "algorithm": "placed", "documents": documents}
    specs = {"in_specs": (rows, P(), P("cp"), P("cp")), "out_specs": rows}
    expert_layer = jax.shard_map(experts_of_rank, mesh=mesh, **specs)

    def loss(params, tokens, is_sparse):
        def layer(x, w):
            out, of_index = attend(*project(norm(x), w), is_sparse, where)
            x = x + out.reshape(*x.shape[:2], -1) @ w["out"]
            x = x + expert_layer(norm(x), w["router"], w["up"], w["down"])
            return x, (of_index * tokens["used"]).sum()

        x, of_index = jax.lax.scan(layer, params["embed"][tokens["token"]], params["layers"])
        log_p = jax.nn.log_softmax(norm(x) @ params["embed"].T)
        return (of_index.sum() - (jax.nn.one_hot(tokens["label"], VOCAB) * log_p).sum()) / COLUMNS

    @jax.jit(static_argnums=2)
    def step(params, tokens, is_sparse):
        value, gradients = jax.value_and_grad(loss)(params, tokens, is_sparse)
        update = lambda path, w, g: w - RATE * g * (is_sparse or "index" in path[-1].key)
        return value, jax.tree_util.tree_map_with_path(update, params, gradients)

    params, tokens = PARAMS, jax.device_put(tokens, NamedSharding(mesh, rows))
    for is_sparse in WARM_UP * [False] + STEPS * [True]:
        value, params = step(params, tokens, is_sparse)
        yield float(value)


ids = np.repeat([[1, 2, 3, 4]], LENGTHS, axis=1)
token = np.random.default_rng(1).integers(0, VOCAB, ids.shape)
label = cpd.sequence.shift_documents(token, -1, segment_ids=ids, fill=-1)
batch = {"token": token, "label": label, "used": ids > 0}
seen = masks.Causal(), masks.SlidingWindow(PICKED)  # the pairs of the index, and of attention
placement = cpd.place_tokens(segment_ids=ids, world_size=8, masks=seen, layers=(1, 4))
placed = [*train(jax.devices(), over_ranks, placement.apply(batch), placement.documents)]

used = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]  # each document in a row of its own
alone = {name: np.full(used.shape, -(name == "label")) for name in batch}
for name, x in batch.items():
    alone[name][used] = x[0]
one = [*train(jax.local_devices()[:1], dense, alone, None)]
np.testing.assert_allclose(placed, one, rtol=1e-4)
print(f"loss {one[0]:.3f} -> {one[-1]:.3f}, 8 devices equal one: verified")
