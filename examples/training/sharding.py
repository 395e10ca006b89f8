"""How the model is sharded over the mesh axes data x context x tensor, and what communicates.

    tokens, labels, documents  [B, T]         B over data, T over context
    activations                [B, T, D]      B over data, T over context and tensor
    q, k, v                    [B, T, N, H]   B over data, T over context, N over tensor
    weights                    [D, F], [F, D] F over tensor; F may be (N, H), N over tensor

`all_gather_matmul` goes from the second form to the third, `matmul_reduce_scatter` back. Attention
communicates over context. XLA sums the gradients.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd

from .data import imbalance, pairs_per_device
from .model import Batch

BATCH, TOKENS = P("data", "context"), P("data", ("context", "tensor"))

# The order of tokens for each algorithm.
ORDERS = {
    "placed": "placed",
    "balanced": "packed",
    "ring": "packed",
    "zigzag": "zigzag",
    "hamilton": "zigzag",
}


def make_mesh(data: int = 2, context: int = 2, tensor: int = 2) -> Mesh:
    axes = {"data": data, "context": context, "tensor": tensor}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The operations of the model on a mesh. Arrays are global; call under `jax.set_mesh`."""

    mesh: Mesh
    algorithm: str

    def prepare(self, batch: Batch) -> Batch:
        """Plans "balanced" once per step, for all layers; one plan for each group of rows."""
        if self.algorithm != "balanced":
            return batch
        plan = partial(cpd.plan_attention, world_size=self.mesh.shape["context"])
        documents = batch["documents"]
        groups = jnp.split(documents.segment_ids, self.mesh.shape["data"])
        return batch | {"documents": documents.with_plan(cpd.stack_plans(map(plan, groups)))}

    def split_tokens(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, TOKENS))

    def gather_matmul(self, x: jax.Array, ws: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return cpd.all_gather_matmul(x, ws, axis_name="tensor")

    def matmul_scatter(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return self.split_tokens(cpd.matmul_reduce_scatter(x, w, axis_name="tensor"))

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> jax.Array:
        return cpd.context_parallel_attention(
            *(q, k, v),
            mesh=self.mesh,
            axis_name="context",
            batch_axis="data",
            head_axis="tensor",
            algorithm=self.algorithm,
            documents=batch["documents"],
        )

    def is_in_order(self, batch: Batch) -> jax.Array:
        return cpd.sequence.check_tokens(
            {name: batch[name] for name in ("tokens", "labels")},
            batch["checksums"],
            documents=batch["documents"],
            mesh=self.mesh,
            axis_name="context",
            batch_axis="data",
        )

    def imbalance(self, batch: Batch) -> jax.Array:
        """Returns the largest work of attention on a device divided by the mean of its group."""
        if self.algorithm == "balanced":
            return imbalance(batch["documents"].plan.pairs)
        shape = self.mesh.shape
        return imbalance(pairs_per_device(batch["documents"], shape["data"], shape["context"]))

    def put(self, batch: Batch) -> Batch:
        """Moves a batch of NumPy arrays to the devices; each process puts the parts of its own."""

        def put(spec: P, part: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec)
            one = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])
            return jax.tree.map(one, part)

        specs = dict.fromkeys(batch, BATCH)
        specs["documents"] = batch["documents"].specs("context", "data")
        specs["checksums"] = P("data")
        return jax.tree.map(put, specs, batch)
