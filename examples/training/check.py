"""Compares training with the same model on one device."""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .data import DataConfig, make_loader
from .model import Batch, ModelConfig
from .sharding import Sharded, make_mesh
from .state import create, make_optimizer, make_step

# Relative differences allowed in float32: of a loss, and of the norm of a gradient's difference.
# Sums have another order, and parameters keep the differences of all steps before.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4


class Unsharded:
    """The operations of the model on one device, without this package."""

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def split_tokens(self, x: jax.Array) -> jax.Array:
        return x

    def gather_matmul(self, x: jax.Array, ws: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(jnp.tensordot(x, w, 1) for w in ws)

    def matmul_scatter(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tensordot(x, w, w.ndim - 1)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> jax.Array:
        ids = batch["documents"].segment_ids
        causal = jnp.tri(ids.shape[1], dtype=bool)
        mask = (ids[:, None, :, None] == ids[:, None, None, :]) & causal
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    def is_in_order(self, batch: Batch) -> jax.Array:
        return jnp.ones((), bool)

    def imbalance(self, batch: Batch) -> jax.Array:
        return jnp.ones(())


class Comparison:
    """Sharded and unsharded training in float32, from the same state, with the same batches.

    Each has its own state and loader. The unsharded model reads the tokens in their usual order.
    """

    def __init__(self, options: argparse.Namespace, model: ModelConfig, data: DataConfig):
        self.mesh, optimizer = make_mesh(data.data, data.context), make_optimizer(options.rate)
        self.ops = Sharded(self.mesh, options.algorithm)
        with jax.set_mesh(self.mesh):
            model = dataclasses.replace(model, dtype="float32")
            structure, self.state = create(model, optimizer, options.seed)
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        self.step = make_step(structure, self.ops, shardings, keep_gradients=True)
        self.loader = make_loader(data)
        self.device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.expected_state = jax.device_put(jax.device_get(self.state), self.device)
        self.expected_step = make_step(structure, Unsharded(), self.device, keep_gradients=True)
        self.expected_loader = make_loader(dataclasses.replace(data, order="packed"))

    def advance(self) -> dict[str, Any]:
        """Makes a step of the sharded model; returns its metrics and gradients."""
        batch = next(self.loader)
        del batch["imbalance_in_order"]
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.step(self.state, self.ops.put(batch))
        return jax.device_get(metrics)

    def advance_expected(self) -> dict[str, Any]:
        """Makes a step of the unsharded model."""
        batch = jax.device_put(next(self.expected_loader), self.device)
        self.expected_state, metrics = self.expected_step(self.expected_state, batch)
        return jax.device_get(metrics)

    def run(self, steps: int) -> tuple[float, float]:
        """Makes steps of both; returns the largest differences of losses and of gradients."""
        worst = 0.0, 0.0
        for number in range(1, steps + 1):
            seen, expected = self.advance(), self.advance_expected()
            loss = abs(seen["loss"] - expected["loss"]) / expected["loss"]
            difference = jax.tree.map(np.subtract, seen["gradients"], expected["gradients"])
            gradient = optax.tree.norm(difference) / optax.tree.norm(expected["gradients"])
            if not (loss <= LOSS_TOLERANCE and gradient <= GRADIENT_TOLERANCE):
                raise AssertionError(
                    f"step {number}: the relative difference to one device is {loss:.1e} for the "
                    f"loss (allowed {LOSS_TOLERANCE}), {gradient:.1e} for the gradients (allowed "
                    f"{GRADIENT_TOLERANCE})."
                )
            worst = max(worst[0], float(loss)), max(worst[1], float(gradient))
        return worst


def compare(options: argparse.Namespace, model: ModelConfig, data: DataConfig) -> None:
    loss, gradient = Comparison(options, model, data).run(options.steps)
    print(
        f"{options.algorithm}, float32, {options.steps} steps: the largest relative difference to "
        f"one device is {loss:.1e} for the loss, {gradient:.1e} for the gradients: verified",
        flush=True,
    )
