"""The state of a run: parameters and optimizer, the training step, and checkpoints."""

import pathlib
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from .model import Batch, ModelConfig, Ops, Transformer, loss

State = Any  # a pytree of float32 arrays: parameters, optimizer state and step
Step = Callable[[State, Batch], tuple[State, dict[str, Any]]]


def make_optimizer(rate: float, warmup_steps: int = 20) -> optax.GradientTransformation:
    schedule = optax.warmup_constant_schedule(0, rate, warmup_steps)
    return optax.chain(optax.clip_by_global_norm(1), optax.adamw(schedule, weight_decay=0.01))


def create(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int):
    """Returns the structure and the state of a new model. Call under `jax.set_mesh`.

    Every parameter is created on the devices that `out_sharding` names; no device holds all.
    """

    @nnx.jit
    def make():
        model = Transformer(config, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    return nnx.split(make())


def make_step(structure: Any, ops: Ops, shardings: Any, *, keep_gradients: bool = False) -> Step:
    """Returns the training step. It donates the state: the new one takes the memory of the old."""

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        model, optimizer = nnx.merge(structure, state)
        batch = ops.prepare(batch)
        value, gradients = nnx.value_and_grad(loss)(model, batch, ops)
        optimizer.update(model, gradients)
        metrics = {
            "loss": jnp.where(ops.is_in_order(batch), value, jnp.nan),
            "gradient_norm": optax.tree.norm(gradients),
            "imbalance": ops.imbalance(batch),
            "labels": (batch["labels"] >= 0).sum(),
        }
        if keep_gradients:
            metrics["gradients"] = gradients
        return nnx.state((model, optimizer)), metrics

    # With the same shardings for the old and the new state, the first step compiles and no other.
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


class Checkpoints:
    """Saves and restores the state and the position of the loader, together, by step."""

    def __init__(self, folder: pathlib.Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def check_empty(self) -> None:
        if (step := self.manager.latest_step()) is not None:
            raise FileExistsError(
                f"{self.manager.directory} has a checkpoint of step {step}. Pass --resume to "
                "continue that run, or another folder as --out."
            )

    def save(self, step: int, state: State, loader: grain.DatasetIterator) -> None:
        position = grain.checkpoint.CheckpointSave(loader)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), loader=position)
        self.manager.save(step, args=items)
        # The next step donates the state, so it waits until the files have been written.
        self.manager.wait_until_finished()

    def restore(self, state: State, loader: grain.DatasetIterator) -> tuple[int, State]:
        """Returns the last saved step and its state, sharded as `state`; moves the loader."""
        step = self.manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"{self.manager.directory} has no checkpoint to resume from.")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        position = grain.checkpoint.CheckpointRestore(loader)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), loader=position)
        return step, self.manager.restore(step, args=items)["state"]
