"""A mixture-of-experts layer: experts sharded over one mesh axis, tokens over another.

Each rank of "expert" has the same tokens. It computes the rows of its own experts by
`grouped_gemm`, and `psum` adds up the results. Compares with one device, gradients included.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(4)

NUM_TOKENS, WIDTH, HIDDEN, NUM_EXPERTS, EXPERTS_PER_TOKEN = 64, 16, 32, 8, 2
SPECS = {"router": P(), "up": P("expert"), "down": P("expert")}
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-5}  # float32, summed in a different order


def operands() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / np.float32(shape[-2] ** 0.5)
    weights = {
        "router": draw(WIDTH, NUM_EXPERTS),
        "up": draw(NUM_EXPERTS, WIDTH, HIDDEN),
        "down": draw(NUM_EXPERTS, HIDDEN, WIDTH),
    }
    return weights, rng.normal(size=(NUM_TOKENS, WIDTH)).astype(np.float32)


def route(weights, x):
    """Returns the experts of each token, and the share of each in its output."""
    shares, experts = jax.lax.top_k(jax.nn.softmax(x @ weights["router"]), EXPERTS_PER_TOKEN)
    return experts, shares


def dense(weights, x):
    """The layer on one device: every expert computes every token."""
    experts, shares = route(weights, x)
    hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, weights["up"]))
    out = jnp.einsum("teh,ehd->ted", hidden, weights["down"])
    return jnp.einsum("tk,tkd->td", shares, jnp.take_along_axis(out, experts[..., None], 1))


def experts_of_rank(weights, x):
    """The part of one rank, inside `shard_map`."""
    experts, shares = route(weights, x)
    # Otherwise the gradients of x and shares lack the rows of other ranks: JAX 0.10.2 takes the
    # result of `argsort` for the same on all ranks, and so what it selects (check_vma=True).
    x, shares = jax.lax.pcast((x, shares), "expert", to="varying")

    num_local = weights["up"].shape[0]
    group = experts.ravel() - jax.lax.axis_index("expert") * num_local
    group = jnp.where((group >= 0) & (group < num_local), group, num_local)  # others come last
    order = jnp.argsort(group)
    sizes = jnp.bincount(group, length=num_local + 1)[:num_local].astype(jnp.int32)
    token = order // EXPERTS_PER_TOKEN

    hidden = jax.nn.gelu(cpd.grouped_gemm(x[token], weights["up"], sizes))
    out = cpd.grouped_gemm(hidden, weights["down"], sizes)  # 0 in the rows of other ranks
    out = out * shares.ravel()[order][:, None]
    return jax.lax.psum(jnp.zeros_like(x).at[token].add(out), "expert")


def main() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    tokens = P("data")
    layer = jax.shard_map(experts_of_rank, mesh=mesh, in_specs=(SPECS, tokens), out_specs=tokens)

    def step(layer):
        loss = lambda weights, x: (layer(weights, x) ** 2).mean()
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    weights, x = operands()
    got = step(layer)(jax.tree.map(place, weights, SPECS), place(x, tokens))
    want = step(dense)(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, want)
    held = got[1][0]["up"].addressable_shards[0].data.shape[0]
    print(f"loss {got[0]:.6f}, {held} of {NUM_EXPERTS} experts per rank: gradients verified")


if __name__ == "__main__":
    main()
