"""Five layers with a window to each one that sees whole documents: one zigzag order for both.

As in Gemma 3. The batch is put in zigzag order once. Local layers receive the keys around their
tokens (`Halo`), global ones let all keys rotate (`Zigzag`). Output and gradients equal dense
attention of each document alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch import cost, masks
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(8)

RANKS, LOCAL_LAYERS, WINDOW, LENGTHS = 8, 5, 20, [150, 75, 1, 30]
N, K, H, WIDTH = 4, 2, 8, 16
LOCAL, GLOBAL = masks.SlidingWindow(WINDOW), masks.Causal()


def init(key):
    sizes = {"q": (WIDTH, N, H), "k": (WIDTH, K, H), "v": (WIDTH, K, H), "out": (N, H, WIDTH)}
    layer = lambda key: {
        name: jax.random.normal(each, size) / WIDTH**0.5
        for (name, size), each in zip(sizes.items(), jax.random.split(key, 4), strict=True)
    }
    first, last = jax.random.split(key)
    return {"local": jax.vmap(layer)(jax.random.split(first, LOCAL_LAYERS)), "global": layer(last)}


def layer(attend, x, w):
    normal = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    q, k, v = (jnp.einsum("btd,dnh->btnh", normal, w[name]) for name in "qkv")
    return x + jnp.einsum("btnh,nhd->btd", attend(q, k, v), w["out"])


def model(local, whole, x, weights):
    """`local` and `whole` attend; the local layers are one scan."""
    x, _ = jax.lax.scan(lambda x, w: (layer(local, x, w), None), x, weights["local"])
    return layer(whole, x, weights["global"])


def mean_square(local, whole, weights, x, target):
    return jnp.mean((model(local, whole, x, weights) - target) ** 2)


def dense(q, k, v, *, window):
    """Of one document."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    i, j = np.ogrid[: q.shape[1], : q.shape[1]]
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    weights = jax.nn.softmax(jnp.where((j <= i) & (i - j < window), logits, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


num_tokens = sum(LENGTHS)
ids = np.repeat([np.arange(1, 1 + len(LENGTHS))], LENGTHS, axis=1)
rng = np.random.default_rng(0)
x, target = rng.normal(size=(2, 1, num_tokens, WIDTH)).astype(np.float32)
weights = init(jax.random.key(1))

# The loader: one order for all layers.
documents = cpd.Documents(ids).zigzag(RANKS)
mesh = Mesh(np.array(jax.devices()), "cp")
stored = jax.device_put(documents.apply((x, target)), NamedSharding(mesh, P(None, "cp")))

# The algorithm of each kind of layer, as `choose_algorithm` predicts for H100s.
choose = partial(
    cpd.choose_algorithm, None, num_ranks=RANKS, tokens_per_rank=8192, layout="zigzag",
    num_heads=32, num_kv_heads=16, head_size=128, itemsize=2, hardware=cost.HARDWARE["h100"],
)  # fmt: skip
for mask in (LOCAL, GLOBAL):
    choice = choose(mask=mask)
    print(mask, "->", choice.algorithm, f"{choice.predictions[choice.algorithm.name].total:.2g} s")

attend = partial(
    cpd.context_parallel_attention, mesh=mesh, axis_name="cp", batch_axis=(), head_axis=()
)
local = partial(attend, algorithm=cpd.Halo(), mask=LOCAL, documents=documents)
whole = partial(attend, algorithm=cpd.Zigzag(), mask=GLOBAL, documents=documents)
together = jax.jit(jax.value_and_grad(partial(mean_square, local, whole)))(weights, *stored)


def alone(weights):
    """Each document by itself, on one device."""
    attends = partial(dense, window=WINDOW), partial(dense, window=num_tokens)
    ends = np.cumsum(LENGTHS)
    parts = [mean_square(*attends, weights, x[:, e - n : e], target[:, e - n : e]) * n
             for n, e in zip(LENGTHS, ends, strict=True)]  # fmt: skip
    return sum(parts) / num_tokens


one = jax.jit(jax.value_and_grad(alone))(weights)
close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
jax.tree.map(close, together, one)

# What a layer moves: all keys of all other ranks, or WINDOW - 1 for each part of a rank.
workload = cost.Workload(RANKS, num_tokens // RANKS, N, K, H, 4, mask=LOCAL)
options = {"hardware": cost.HARDWARE["h100"], "with_backward": True}
halo, ring = cpd.Halo("zigzag"), cpd.Zigzag()
moved = [algorithm.predict(workload, **options).bytes_per_rank for algorithm in (halo, ring)]
print(f"loss {together[0]:.4f}; a local layer sends {moved[0]:,.0f} bytes per rank, "
      f"a ring {moved[1]:,.0f}: verified")  # fmt: skip
