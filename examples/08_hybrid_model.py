"""A hybrid model with multi-token prediction: packed documents over 8 devices, placed and zigzag.

Twice three delta-rule layers with short convolutions and one of attention; predicts the next token
and the one after it. Training equals one device that computes each document alone. In 4 processes:

    python -m jax_cp_dispatch.launch --processes 4 --devices 2 examples/08_hybrid_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch import sequence
from jax_cp_dispatch.cpu_devices import start_cpu_devices

if cpd.initialize().implementation == "in_process":  # not one of several processes
    start_cpu_devices(8)

LENGTHS = [100, 30, 1, 125]  # of the documents; the first and the last are longer than a rank
COLUMNS, VOCAB, WIDTH, HEADS, TAPS, STEPS, RATE = 256, 64, 32, 2, 4, 8, 0.05
SIZE = WIDTH // HEADS


def weights():
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)
    layers = lambda *n: {"qkv": draw(*n, WIDTH, 3 * WIDTH), "out": draw(*n, WIDTH, WIDTH)}
    gates = {"gates": draw(2, 3, WIDTH, 2 * HEADS), "taps": draw(2, 3, TAPS, 3 * WIDTH)}
    blocks = {"delta": layers(2, 3) | gates, "attention": layers(2)}
    return {"embed": draw(VOCAB, WIDTH) * 2, "blocks": blocks, "second": draw(WIDTH, WIDTH)}


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 0.1)


def heads(x):
    return jnp.split(x.reshape(*x.shape[:2], 3 * HEADS, SIZE), 3, axis=2)


def delta_layer(where, x, w):
    mixed = sequence.causal_conv(norm(x) @ w["qkv"], w["taps"], **where)
    q, k, v = heads(jax.nn.silu(mixed))
    decay, beta = jnp.split(norm(x) @ w["gates"], 2, axis=-1)
    k = k * jax.lax.rsqrt((k * k).sum(-1, keepdims=True) + 0.1)  # beta |k|^2 is below 2
    gates = -jax.nn.softplus(decay), jax.nn.sigmoid(beta)
    out = sequence.gated_delta_rule(q, k, v, *gates, **where)
    return x + out.reshape(x.shape) @ w["out"]


def attention_layer(where, x, w):
    q, k, v = heads(norm(x) @ w["qkv"])
    algorithm = "zigzag" if where["documents"].plan is None else "placed"
    out = cpd.context_parallel_attention(q, k, v, algorithm=algorithm, **where)
    return x + out.reshape(x.shape) @ w["out"]


def loss_on_rank(params, tokens, where):
    """The loss of all ranks, from the rows of this one."""

    def block(x, w):
        x = jax.lax.scan(lambda x, w: (delta_layer(where, x, w), None), x, w["delta"])[0]
        return attention_layer(where, x, w["attention"]), None

    # Otherwise its gradient lacks the rows of other ranks, in JAX 0.10.2 (check_vma=True).
    embed = jax.lax.pcast(params["embed"], "cp", to="varying")
    x = jax.lax.scan(block, embed[tokens["token"]], params["blocks"])[0]
    deeper = norm(x) @ params["second"] + embed[tokens["next"]]
    total = 0.0
    for hidden, label in ((x, tokens["label_1"]), (deeper, tokens["label_2"])):
        log_p = jax.nn.log_softmax(norm(hidden) @ embed.T)
        log_p = jnp.take_along_axis(log_p, jnp.maximum(label, 0)[..., None], -1)[..., 0]
        total -= jnp.where(label >= 0, log_p, 0).sum()
    return jax.lax.psum(total, "cp") / COLUMNS


def train(devices, tokens, documents):
    """Returns the loss of each step; the tokens are in the order of the documents."""
    mesh = Mesh(np.array(devices), "cp")
    specs = P(), P(None, "cp"), documents.specs("cp")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params, tokens, documents = jax.device_put((weights(), tokens, documents), shardings)

    on_rank = lambda w, x, d: loss_on_rank(w, x, {"axis_name": "cp", "documents": d})
    on_ranks = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P())

    @jax.jit
    def step(params, tokens, documents):
        loss, gradients = jax.value_and_grad(on_ranks)(params, tokens, documents)
        return loss, jax.tree.map(lambda w, g: w - RATE * g, params, gradients)

    losses = []
    for _ in range(STEPS):
        loss, params = step(params, tokens, documents)
        losses.append(float(loss))
    return losses


ids = np.repeat([np.arange(1, 1 + len(LENGTHS))], LENGTHS, axis=1)
token = np.random.default_rng(1).integers(0, VOCAB, (1, COLUMNS))
documents = cpd.Documents(ids)
shift = lambda n, **fill: sequence.shift_documents(token, n, documents=documents, **fill)
batch = {"token": token, "next": shift(-1), "label_1": shift(-1, fill=-1)}
batch["label_2"] = shift(-2, fill=-1)

placement = cpd.place_tokens(segment_ids=ids, world_size=8)
placed = train(jax.devices(), placement.apply(batch), placement.documents)
in_zigzag = train(jax.devices(), (zigzag := documents.zigzag(8)).apply(batch), zigzag)

of_row = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]  # each document in a row of its own
alone = {name: np.full(of_row.shape, -(name > "l")) for name in batch}
for name, x in batch.items():
    alone[name][of_row] = x[0]
one = train(jax.local_devices()[:1], alone, cpd.Documents(of_row.astype(np.int32)))
np.testing.assert_allclose(placed, one, rtol=1e-4)
np.testing.assert_allclose(in_zigzag, one, rtol=1e-4)
if jax.process_index() == 0:
    print(f"loss {one[0]:.3f} -> {one[-1]:.3f}: 8 devices, placed and zigzag, equal one: verified")
