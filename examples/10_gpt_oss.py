"""gpt-oss blocks in Flax NNX: packed documents over 8 devices, one placement for both masks.

Sinks, RoPE, experts, and a window in every second layer. The tokens are placed once, with a plan
for each mask. Training equals dense attention of each document alone, on one device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch import masks
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(8)

LENGTHS = [100, 30, 1, 125]  # of the documents; the first and the last are longer than a rank
COLUMNS, VOCAB, WIDTH, PAIRS, STEPS, RATE = 256, 64, 32, 2, 10, 0.1  # PAIRS of layers
N, K, H, WINDOW, NUM_EXPERTS, CHOSEN, HIDDEN = 4, 2, 8, 16, 4, 2, 32
MASKS = (masks.SlidingWindow(WINDOW), masks.Causal())  # of the layers of a pair


def rope(x, positions):
    angle = positions[..., None, None] * 1e4 ** -jnp.linspace(0, 1, H // 2)
    turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * jnp.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


class Layer(nnx.Module):
    """Attention with sinks; experts that a router chooses."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(WIDTH, (N + 2 * K) * H, rngs=rngs)
        self.out = nnx.Linear(N * H, WIDTH, rngs=rngs)
        self.router = nnx.Linear(WIDTH, NUM_EXPERTS, rngs=rngs)
        draw = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape) / shape[-1] ** 0.5)
        shapes = (N,), (NUM_EXPERTS, WIDTH, HIDDEN), (NUM_EXPERTS, HIDDEN, WIDTH)
        self.sinks, self.up, self.down = (draw(*shape) for shape in shapes)

    def __call__(self, x, positions, attend):
        heads = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], -1, H)
        q, k, v = jnp.split(heads, (N, N + K), axis=2)
        out = attend(rope(q, positions), rope(k, positions), v, sink=self.sinks[...])
        x = x + self.out(out.reshape(*x.shape[:2], -1))
        return x + self.experts(self.norms[1](x))

    def experts(self, x):  # every token by every expert; 09_expert_parallel.py moves it to its own
        threshold = jax.lax.top_k(logits := self.router(x), CHOSEN)[0][..., -1:]
        shares = jax.nn.softmax(jnp.where(logits >= threshold, logits, -jnp.inf))
        hidden = jax.nn.silu(jnp.einsum("btd,edh->bteh", x, self.up[...]))
        return jnp.einsum("bteh,ehd,bte->btd", hidden, self.down[...], shares)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        make = nnx.split_rngs(splits=PAIRS)(nnx.vmap(Layer))
        self.layers = nnx.List([make(rngs) for _ in MASKS])  # stacked over pairs, for a scan
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, attends):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def pair(layers, x):
            for layer, attend in zip(layers, attends, strict=True):
                x = layer(x, tokens["position"], attend)
            return x

        return self.embed.attend(self.norm(pair(self.layers, self.embed(tokens["token"]))))


def train(tokens, attends, operands):
    """Returns the loss of each step. `attends(operands)` has an attention for each mask."""
    model = Model(nnx.Rngs(0))

    def mean_loss(model, tokens, operands):
        labels = jax.nn.one_hot(tokens["label"], VOCAB)  # no word for a label of -1
        return -(labels * jax.nn.log_softmax(model(tokens, attends(operands)))).sum() / COLUMNS

    @nnx.jit
    def step(model, tokens, operands):
        loss, gradients = nnx.value_and_grad(mean_loss)(model, tokens, operands)
        nnx.update(model, jax.tree.map(lambda w, g: w - RATE * g, nnx.state(model), gradients))
        return loss

    return [float(step(model, tokens, operands)) for _ in range(STEPS)]


def dense_attention(q, k, v, *, sink, window):
    """Each row is one document, from its first column on."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    i, j = np.ogrid[: q.shape[1], : q.shape[1]]
    e = jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5) * ((j <= i) & (i - j < window))
    total = e.sum(-1, keepdims=True) + jnp.exp(sink)[:, None, None]
    return jnp.einsum("bnts,bsnh->btnh", e / total, v)


ids = np.repeat([np.arange(1, 1 + len(LENGTHS))], LENGTHS, axis=1)
batch = {"token": np.random.default_rng(1).integers(0, VOCAB, (1, COLUMNS))}
batch["position"] = cpd.Documents(ids).positions
batch["label"] = cpd.sequence.shift_documents(batch["token"], -1, segment_ids=ids, fill=-1)
mesh = Mesh(np.array(jax.devices()), "cp")
placement = cpd.place_tokens(segment_ids=ids, world_size=8, masks=MASKS, layers=(PAIRS, PAIRS))
placed = jax.device_put(placement.apply(batch), NamedSharding(mesh, P(None, "cp")))
attend = partial(cpd.context_parallel_attention, mesh=mesh, axis_name="cp", algorithm="placed")
attends = lambda documents: [partial(attend, documents=documents, mask=mask) for mask in MASKS]
together = train(placed, attends, placement.documents)

alone = {name: np.full((len(LENGTHS), max(LENGTHS)), -(name == "label")) for name in batch}
for name, x in batch.items():
    for row, part in zip(alone[name], np.split(x[0], np.cumsum(LENGTHS)[:-1]), strict=True):
        row[: len(part)] = part
one = train(alone, lambda x: [partial(dense_attention, window=w) for w in x], (WINDOW, COLUMNS))
np.testing.assert_allclose(together, one, rtol=1e-4)
moved = " and ".join(str(plan.num_kv_tokens_moved) for plan in placement.plans)
print(f"loss {one[0]:.3f} -> {one[-1]:.3f}, {moved} keys moved, equal to one device: verified")
