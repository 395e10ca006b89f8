"""The programs that are compiled: every public function that runs on devices, with its gradient."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch import masks, sequence

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
    def plan(self) -> cpd.PlacedPlan:
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


def attention(shapes: Shapes, algorithm: str) -> Program:
    def run(q, k, v, ids):
        options: dict[str, Any] = {"algorithm": algorithm, "segment_ids": ids}
        if algorithm == "placed":
            options["plan"] = shapes.plan
        return cpd.context_parallel_attention(q, k, v, **options, **shapes.on_axis)

    return Program(run, (*shapes.qkv, shapes.ids), (0, 1, 2))


def on_three_axes(shapes: Shapes, algorithm: str) -> Program:
    """Groups of ranks for the rows of a batch, and heads of several devices, as in training."""
    data = 2 if len(shapes.devices) >= 8 else 1
    return attention(Shapes(shapes.devices, data=data, tensor=2), algorithm)


def ring_of_trees(shapes: Shapes) -> Program:
    """A mask of arrays, whose keys have ranges of queries."""

    def run(q, k, v, ids, subtree_end):
        mask = masks.Ranges(jnp.zeros_like(ids), ids + 1, jnp.zeros_like(ids), subtree_end)
        options: dict[str, Any] = {"algorithm": "ring", "mask": mask}
        return cpd.context_parallel_attention(q, k, v, **options, **shapes.on_axis)

    return Program(run, (*shapes.qkv, shapes.ids, shapes.ids), (0, 1, 2))


def balanced_with_a_plan(shapes: Shapes) -> Program:
    plan = cpd.plan_attention(lengths=shapes.lengths, world_size=shapes.num_ranks)
    attend = functools.partial(
        cpd.context_parallel_attention, algorithm="balanced", plan=plan, **shapes.on_axis
    )
    return Program(attend, shapes.qkv, (0, 1, 2))


class Heads(NamedTuple):
    queries: int = HEADS
    keys: int = KV_HEADS
    size: int = HEAD_SIZE
    values: int = HEAD_SIZE


_HEADS = Heads()


def local_attention(
    shapes: Shapes, num_tokens: int = TOKENS, heads: Heads = _HEADS, of_queries: bool = False
) -> Program:
    """Of one device; `of_queries`: keys have ranges of queries."""
    like = functools.partial(shapes.on_one_device, 1, num_tokens)
    kv = like(heads.keys, heads.size), like(heads.keys, heads.values)
    ranges = (like(dtype=jnp.int32),) * (4 if of_queries else 2)

    def run(q, k, v, *ranges):
        names = ("kv_start", "kv_end", "q_start", "q_end")
        return cpd.local_attention(q, k, v, **dict(zip(names, ranges, strict=False)))

    return Program(run, (like(heads.queries, heads.size), *kv, *ranges), (0, 1, 2))


def _movement(shapes: Shapes) -> cpd.Metadata:
    return shapes.placement.plan.kv_metadata


def _rows(shapes: Shapes, num_rows: int) -> jax.ShapeDtypeStruct:
    return shapes.array((num_rows, KV_HEADS, HEAD_SIZE), jnp.bfloat16, P("cp"))


def _on_each_rank(shapes: Shapes, move: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function of one rank's rows and metadata on every rank."""
    specs = jax.tree.map(lambda _: P("cp"), _movement(shapes))
    on_ranks = jax.shard_map(
        move, mesh=shapes.mesh, in_specs=(P("cp"), specs), out_specs=P("cp"), check_vma=False
    )
    return lambda x: on_ranks(x, _movement(shapes))


def dispatch(shapes: Shapes, *, on_ranks: bool, implementation: str = "xla") -> Program:
    options = {"capacity": shapes.placement.plan.kv_capacity, "axis_name": "cp"}
    move = functools.partial(cpd.dispatch, implementation=implementation, **options)
    run = lambda x: move(x, _movement(shapes), mesh=shapes.mesh)
    x = _rows(shapes, shapes.num_tokens)
    return Program(_on_each_rank(shapes, move) if on_ranks else run, (x,), (0,))


def combine(shapes: Shapes, *, on_ranks: bool, implementation: str = "xla") -> Program:
    options = {"num_tokens": TOKENS, "axis_name": "cp"}
    move = functools.partial(cpd.combine, implementation=implementation, **options)
    run = lambda y: move(y, _movement(shapes), mesh=shapes.mesh)
    y = _rows(shapes, shapes.placement.plan.kv_capacity * shapes.num_ranks)
    return Program(_on_each_rank(shapes, move) if on_ranks else run, (y,), (0,))


def plan_attention(shapes: Shapes) -> Program:
    run = functools.partial(cpd.plan_attention, world_size=shapes.num_ranks)
    ids = shapes.array((1, shapes.num_tokens), jnp.int32, P())
    return Program(run, (ids,), ())


def all_gather_matmul_of_global_arrays(shapes: Shapes) -> Program:
    options = {"axis_name": "cp", "implementation": "xla", "mesh": shapes.mesh}
    one = all_gather_matmul(shapes)
    return one._replace(run=lambda x, w: cpd.all_gather_matmul(x, w, **options))


def _on_ranks(shapes: Shapes, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(fn, mesh=shapes.mesh, in_specs=in_specs, out_specs=out_specs)


def all_gather_matmul(shapes: Shapes, implementation: str = "xla") -> Program:
    fn = functools.partial(cpd.all_gather_matmul, axis_name="cp", implementation=implementation)
    run = _on_ranks(shapes, lambda x, w: fn(x, w), (P("cp"), P(None, "cp")), P(None, "cp"))
    x = shapes.array((shapes.num_tokens, 1024), jnp.bfloat16, P("cp"))
    w = shapes.array((1024, 512 * shapes.num_ranks), jnp.bfloat16, P(None, "cp"))
    return Program(run, (x, w), (0, 1))


def matmul_reduce_scatter(shapes: Shapes, implementation: str = "xla") -> Program:
    options = {"axis_name": "cp", "implementation": implementation}
    fn = functools.partial(cpd.matmul_reduce_scatter, **options)
    run = _on_ranks(shapes, lambda x, w: fn(x, w), (P(None, "cp"), P("cp")), P("cp"))
    x = shapes.array((shapes.num_tokens, 512 * shapes.num_ranks), jnp.bfloat16, P(None, "cp"))
    w = shapes.array((512 * shapes.num_ranks, 1024), jnp.bfloat16, P("cp"))
    return Program(run, (x, w), (0, 1))


def gemm(shapes: Shapes, implementation: str = "xla") -> Program:
    x, w = (shapes.on_one_device(*shape) for shape in ((TOKENS, 1024), (1024, 4096)))
    bias = shapes.on_one_device(4096)
    run = lambda x, w, bias: cpd.gemm(x, w, bias=bias, implementation=implementation)
    return Program(run, (x, w, bias), (0, 1, 2))


def grouped_gemm(shapes: Shapes) -> Program:
    x, w = (shapes.on_one_device(*shape) for shape in ((TOKENS, 1024), (8, 1024, 512)))
    sizes = shapes.on_one_device(8, dtype=jnp.int32)
    return Program(cpd.grouped_gemm, (x, w, sizes), (0, 1))


def _layer(name: str, shapes: Shapes) -> Program:
    """A layer of `cpd.sequence` in placed order."""
    plan, options = shapes.placement.plan, shapes.on_axis
    heads = shapes.tokens(HEADS, 64)
    gate = shapes.tokens(HEADS, dtype=jnp.float32)
    weights = shapes.array((4, 512), jnp.float32, P())
    features = shapes.tokens(512)
    layer = functools.partial(getattr(sequence, name), plan=plan, **options)
    arrays = {
        "shift": (features,),
        "causal_conv": (features, weights),
        "gated_delta_rule": (heads, heads, heads, gate, gate),
        "linear_attention": (heads, heads, heads, gate),
        "linear_recurrence": (features, features),
    }[name]
    if name == "shift":
        layer = functools.partial(layer, offset=-1)
    return Program(lambda *x: layer(*x), arrays, tuple(range(len(arrays))))


_LAYERS = ("shift", "causal_conv", "gated_delta_rule", "linear_attention", "linear_recurrence")
PROGRAMS: dict[str, Callable[[Shapes], Program]] = {
    "ring": functools.partial(attention, algorithm="ring"),
    "placed": functools.partial(attention, algorithm="placed"),
    "dispatch": functools.partial(dispatch, on_ranks=True),
    "combine": functools.partial(combine, on_ranks=True),
    "dispatch, global arrays": functools.partial(dispatch, on_ranks=False),
    "combine, global arrays": functools.partial(combine, on_ranks=False),
    "zigzag": functools.partial(attention, algorithm="zigzag"),
    **{
        f"{name}, data and tensor axes": functools.partial(on_three_axes, algorithm=name)
        for name in ("ring", "placed", "zigzag")
    },
    "hamilton": functools.partial(attention, algorithm="hamilton"),
    "ulysses": functools.partial(attention, algorithm="ulysses"),
    "ring, ranges of queries": ring_of_trees,
    "balanced, planned inside": functools.partial(attention, algorithm="balanced"),
    "balanced, planned before": balanced_with_a_plan,
    "local_attention": local_attention,
    "plan_attention": plan_attention,
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "gemm": gemm,
    "grouped_gemm": grouped_gemm,
    "all_gather_matmul, global arrays": all_gather_matmul_of_global_arrays,
    **{f"sequence.{name}": functools.partial(_layer, name) for name in _LAYERS},
}
# By this package's own kernels: custom calls.
_OWN: dict[str, Callable[..., Program]] = {
    "dispatch": functools.partial(dispatch, on_ranks=True),
    "combine": functools.partial(combine, on_ranks=True),
    "gemm": gemm,
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}
PROGRAMS_FOR_GPUS: dict[str, Callable[[Shapes], Program]] = {
    f"{name}, cuda_peer": functools.partial(program, implementation="cuda_peer")
    for name, program in _OWN.items()
}
PROGRAMS_FOR_TPUS: dict[str, Callable[[Shapes], Program]] = {
    "local_attention, 8K tokens": functools.partial(
        local_attention, num_tokens=8192, heads=Heads(keys=2), of_queries=True
    ),
    "local_attention, 64K tokens": functools.partial(
        local_attention, num_tokens=65536, heads=Heads(keys=2)
    ),
    "local_attention, 64K tokens, 16 heads of 192 and 128 per KV head": functools.partial(
        local_attention, num_tokens=65536, heads=Heads(16, 1, 192)
    ),
}
