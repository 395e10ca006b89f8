"""How the model is sharded over the mesh axes data x context x tensor, and what communicates.

    batch arrays               [B, T]         B over data, T over context
    activations                [B, T, D]      B over data, T over context and tensor
    q, k, v                    [B, T, N, H]   B over data, T over context, N over tensor
    weights                    [D, F]         F over tensor

`all_gather_matmul` goes from the second form to the third, `matmul_reduce_scatter` back. Attention
communicates over context. XLA sums the gradients.
"""

import dataclasses
from functools import partial

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd

from .data import imbalance, pairs_per_device
from .model import Batch

BATCH, TOKENS = P("data", "context"), P("data", ("context", "tensor"))
HEADS = P("data", "context", "tensor")

# The order of tokens for each algorithm.
LAYOUTS = {
    "placed": "placed",
    "balanced": "contiguous",
    "ring": "contiguous",
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
        """Plans attention once per step, for all layers. A plan of the loader stays as it is."""
        if self.algorithm != "balanced":
            return batch
        ids = batch["segment_ids"]
        groups = ids.reshape(self.mesh.shape["data"], -1, ids.shape[1])
        plan = partial(cpd.plan_attention, world_size=self.mesh.shape["context"])
        return batch | {"plan": jax.vmap(plan)(groups)}

    def split_tokens(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, TOKENS))

    def gather_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return cpd.all_gather_matmul(x, w, axis_name="tensor")

    def matmul_scatter(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return self.split_tokens(cpd.matmul_reduce_scatter(x, w, axis_name="tensor"))

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> jax.Array:
        if "plan" in batch:
            return self._attend_planned(q, k, v, batch)
        return cpd.context_parallel_attention(
            *(q, k, v),
            mesh=self.mesh,
            axis_name="context",
            batch_axis="data",
            head_axis="tensor",
            algorithm=self.algorithm,
            layout=LAYOUTS[self.algorithm],
            segment_ids=batch["segment_ids"],
        )

    def _attend_planned(self, q, k, v, batch: Batch) -> jax.Array:
        """Each data group follows its own plan; the leaves are stacked, [data, context, ...].

        The ids are for comparison: a plan of another batch is an error.
        """
        attend = cpd.placed_attention if self.algorithm == "placed" else cpd.balanced_attention

        def local(q, k, v, plans, ids):  # one device's part
            plan = jax.tree.map(lambda x: x[0], plans)  # that of its group
            return attend(q, k, v, plan, axis_name="context", segment_ids=ids)

        specs = (HEADS, HEADS, HEADS, BATCH, BATCH)
        sharded = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=HEADS)
        return sharded(q, k, v, batch["plan"], batch["segment_ids"])

    def imbalance(self, batch: Batch) -> jax.Array:
        """Returns the largest work of attention on a device divided by the mean of its group."""
        if self.algorithm == "balanced":
            return imbalance(batch["plan"].pairs_after)
        shape = self.mesh.shape
        return imbalance(pairs_per_device(batch, shape["data"], shape["context"]))

    def put(self, batch: Batch) -> Batch:
        """Moves a batch of NumPy arrays to the devices."""
        return jax.device_put(batch, NamedSharding(self.mesh, BATCH))
