"""Programs to compile: functions of arrays, and the shapes of one rank's arrays on a mesh."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd

TOKENS = 4096  # of a rank
HEADS, KV_HEADS, HEAD_SIZE = 8, 4, 128
ROWS = P(None, "cp")


class Program(NamedTuple):
    """A function of arrays, and their shapes with shardings."""

    run: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    argnums: tuple[int, ...]  # of the arrays with gradients

    def trace(self) -> Any:
        """Traces the result and the gradients of all floating-point arrays."""
        if not self.argnums:
            return jax.jit(self.run).trace(*self.shapes)

        def loss(*arrays: Any) -> Any:
            results = jax.tree.leaves(self.run(*arrays))
            return sum((x.astype(jnp.float32) ** 2).sum() for x in results)

        return jax.jit(jax.value_and_grad(loss, self.argnums)).trace(*self.shapes)


class Shapes:
    """The arrays of one rank's size, for a mesh of all devices.

    Args:
      devices: all of them.
      data: devices over which batch rows are split, one row each.
      tensor: devices over which heads are split.
    """

    def __init__(self, devices: list[Any], data: int = 1, tensor: int = 1):
        self.devices, self.data, self.tensor = devices, data, tensor
        shape, names = (data, -1, tensor), ("data", "cp", "tensor")
        if data == tensor == 1:
            shape, names = -1, ("cp",)
        self.mesh = Mesh(np.array(devices).reshape(shape), names)
        self.num_ranks = self.mesh.shape["cp"]
        self.num_tokens = TOKENS * self.num_ranks
        random = np.random.default_rng(0)
        shares = random.dirichlet(np.full(12, 0.4), data)
        self.lengths = [random.multinomial(self.num_tokens, row).tolist() for row in shares]

    def array(self, shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def tokens(self, *rest: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        names = self.mesh.axis_names
        axes = ("data", "cp", "tensor")[: 2 + len(rest)]
        spec = P(*(name if name in names else None for name in axes))
        return self.array((self.data, self.num_tokens, *rest), dtype, spec)

    def on_one_device(self, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        device = jax.sharding.SingleDeviceSharding(self.devices[0])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    @property
    def qkv(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        heads = max(HEADS, self.num_ranks)  # of which every rank can have a share
        return tuple(self.tokens(n, HEAD_SIZE) for n in (heads, KV_HEADS, KV_HEADS))

    @property
    def ids(self) -> jax.ShapeDtypeStruct:
        return self.tokens(dtype=jnp.int32)

    @functools.cached_property
    def placement(self) -> cpd.Placement:
        return cpd.place_tokens(self.lengths, world_size=self.num_ranks)

    @property
    def plan(self) -> cpd.Plan:
        """The plan of each group of ranks."""
        if self.data == 1:
            return self.placement.plan
        place = functools.partial(cpd.place_tokens, world_size=self.num_ranks)
        return cpd.stack_plans([place([row]).plan for row in self.lengths])

    @property
    def on_axis(self) -> dict[str, Any]:
        options = {"mesh": self.mesh, "axis_name": "cp", "implementation": "xla"}
        if "data" in self.mesh.axis_names:
            options |= {"batch_axis": "data", "head_axis": "tensor"}
        return options


def on_ranks(shapes: Shapes, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """A function of the part of each rank."""
    return jax.shard_map(fn, mesh=shapes.mesh, in_specs=in_specs, out_specs=out_specs)
