"""Trains a tensor-parallel MLP in MXFP8; its loss follows that of float32.

On four virtual CPU devices, the model learns to predict the next byte of this project's
documentation from the previous four. Both GEMMs of the MLP, and those of their derivatives with a
weight, multiply 8-bit operands: blocks of 32 elements share a power of two as scale. Tokens and
their gradients are also gathered in 8 bits. The same model, data and seed also run in float32, and
with delayed scaling, whose state is a parameter.
"""

import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(4)  # virtual ones, before JAX starts

AXIS, STEPS, RATE = "tp", 200, 3e-3
CONTEXT, WIDTH, D, F = 4, 32, 128, 512  # context bytes, embedding width, widths of both layers
TOKENS = 128
TEXT = sorted((pathlib.Path(__file__).parents[1] / "docs").glob("*.md"))
SPLIT = {"embed": P(), "up": P(None, AXIS), "down": P(AXIS), "out": P(), "scaling": P()}


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype("f") / np.float32(shape[0] ** 0.5)
    layers = {"embed": draw(256, WIDTH) * 8, "up": draw(D, F), "down": draw(F, D)}
    return {**layers, "out": draw(D, 256), "scaling": {}}


def batches() -> np.ndarray:
    """Returns [STEPS, TOKENS, CONTEXT + 1]: context bytes, and the byte that follows them."""
    text = np.frombuffer(b"".join(path.read_bytes() for path in TEXT), np.uint8)
    first = np.random.default_rng(1).integers(0, len(text) - CONTEXT, (STEPS, TOKENS, 1))
    return text[first + np.arange(CONTEXT + 1)].astype(np.int32)


def loss_of(mode: str, weights, tokens):
    """Returns one rank's loss, for its tokens [TOKENS / 4, CONTEXT + 1] and shards of weights."""
    x = weights["embed"][tokens[:, :CONTEXT]].reshape(-1, D)
    state = lambda name: weights["scaling"].get(name)
    product: Any = {"axis_name": AXIS, "scaling_mode": mode}
    hidden = cpd.all_gather_matmul(x, weights["up"], scaling_state=state("up"), **product)
    x = x + cpd.matmul_reduce_scatter(
        jax.nn.gelu(hidden), weights["down"], scaling_state=state("down"), **product
    )
    right = jnp.take_along_axis(jax.nn.log_softmax(x @ weights["out"]), tokens[:, CONTEXT:], -1)
    return jax.lax.pmean(-right.mean(), AXIS)


def train(mode: str, weights, data) -> np.ndarray:
    """Trains with Adam (one decay for both moments); returns the loss of each step."""
    mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (SPLIT, P(AXIS)), "out_specs": P()}
    loss = jax.shard_map(partial(loss_of, mode), mesh=mesh, **specs)

    def step(carry, batch):
        weights, mean, square, count = carry
        value, gradient = jax.value_and_grad(loss)(weights, batch)
        scaling = gradient["scaling"]  # not a gradient but the state for the next step
        mean, square = (
            jax.tree.map(lambda m, g, power=power: 0.9 * m + 0.1 * g**power, moment, gradient)
            for moment, power in ((mean, 1), (square, 2))
        )
        moved = jax.tree.map(
            lambda w, m, s: (
                w - RATE * m / (1 - 0.9**count) / ((s / (1 - 0.9**count)) ** 0.5 + 1e-8)
            ),
            weights,
            mean,
            square,
        )
        return ({**moved, "scaling": scaling}, mean, square, count + 1), value

    zeros = jax.tree.map(np.zeros_like, weights)
    run = jax.jit(partial(jax.lax.scan, step))
    return np.asarray(run((weights, zeros, zeros, 1.0), data)[1])


def main() -> None:
    weights, data = parameters(), batches()
    state = {name: cpd.scaling.MatmulScaling.init() for name in ("up", "down")}
    losses = {
        "NO_SCALING": train("NO_SCALING", weights, data),
        "MXFP8_1D_SCALING": train("MXFP8_1D_SCALING", weights, data),
        "DELAYED_TENSOR_SCALING": train(
            "DELAYED_TENSOR_SCALING", {**weights, "scaling": state}, data
        ),
    }
    print(
        "mean loss of steps", *(f"{first:>3} .. {first + 19:>3}" for first in range(0, STEPS, 60))
    )
    for mode, loss in losses.items():
        windows = loss.reshape(-1, 20).mean(1)
        print(f"{mode:>22}", *(f"{mean:10.4f}" for mean in windows[::3]))
    exact = losses["NO_SCALING"]
    assert exact[-20:].mean() < 0.75 * exact[:20].mean(), "it learns"
    for mode in ("MXFP8_1D_SCALING", "DELAYED_TENSOR_SCALING"):
        difference = np.abs(losses[mode] / exact - 1)
        assert difference.max() < 0.02, mode
        print(f"{mode}: {100 * difference.max():.2f} % or less from float32 in each step: verified")


if __name__ == "__main__":
    main()
