"""The programs that are compiled: every public function that runs on devices, with its gradient."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from programs_of_attention import (
    Heads,
    attention,
    backward_alone,
    balanced_with_a_plan,
    documents,
    local_attention,
    merge_partials,
    on_three_axes,
    on_two_levels,
    picked_blocks,
    ring_of_trees,
    selected_attention,
)
from programs_of_exchanges import (
    beside_two_products,
    combine,
    combine_qkv,
    dispatch,
    dispatch_qkv,
    projections,
    return_of_rows,
    rows_of,
)
from programs_of_experts import layer_of_experts, ragged_all_to_all
from shapes import HEADS, ROWS, TOKENS, Program, Shapes, on_ranks

import jax_cp_dispatch as cpd
from jax_cp_dispatch import masks, metadata, scaling, sequence
from jax_cp_dispatch.attention import chunk_exchange, ring_exchange


def exchange_in_ring(shapes: Shapes) -> Program:
    move = functools.partial(ring_exchange, axis_name="cp", implementation="xla")
    rows = rows_of(shapes, shapes.num_tokens)
    return Program(on_ranks(shapes, move, P("cp"), P("cp")), (rows,), (0,))


def exchange_chunks(shapes: Shapes) -> Program:
    """A chunk from each rank to each other one."""
    ranks = np.arange(shapes.num_ranks)
    sent = np.where(ranks == ranks[:, None], -1, (ranks - ranks[:, None] - 1) % len(ranks))
    maps = sent.tolist(), sent.T.tolist()
    move = lambda chunks: chunk_exchange(chunks, *maps, axis_name="cp", implementation="xla")
    size = len(ranks) - 1, 128
    split = lambda x: move(x.reshape(*size, *x.shape[1:])).reshape(x.shape)
    rows = rows_of(shapes, math.prod(size) * len(ranks))
    return Program(on_ranks(shapes, split, P("cp"), P("cp")), (rows,), (0,))


def plan_attention(shapes: Shapes) -> Program:
    run = functools.partial(cpd.plan_attention, world_size=shapes.num_ranks)
    ids = shapes.array((1, shapes.num_tokens), jnp.int32, P())
    return Program(run, (ids,), ())


def metadata_of_shards(shapes: Shapes) -> Program:
    """All plans of an exchange with 16 shards for each rank, of which keys go to 4 ranks."""
    like = functools.partial(shapes.on_one_device, shapes.num_ranks, dtype=jnp.int32)
    shards, replicas = like(16), like(16, 4)

    def run(shard, num_seqs, to_query, query_rank):
        sizes: dict[str, Any] = {"max_recv_seqs": 64}
        keys = metadata.compute_metadata_kv(
            to_query, query_rank, shard, shard, shard, shard, num_seqs, shard, **sizes
        )
        lengths = metadata.compute_attn_layout_seqlens(shard, shard, shard, **sizes)
        return cpd.compute_metadata(shard, shard, **sizes), keys, lengths

    return Program(run, (shards, like(), like(16, 4, 2), replicas), ())


def all_gather_matmul_of_global_arrays(shapes: Shapes) -> Program:
    options = {"axis_name": "cp", "implementation": "xla", "mesh": shapes.mesh}
    one = all_gather_matmul(shapes)
    return one._replace(run=lambda x, w: cpd.all_gather_matmul(x, w, **options))


def all_gather_matmul(shapes: Shapes, implementation: str = "xla") -> Program:
    fn = functools.partial(cpd.all_gather_matmul, axis_name="cp", implementation=implementation)
    run = on_ranks(shapes, lambda x, w: fn(x, w), (P("cp"), P(None, "cp")), P(None, "cp"))
    x = shapes.array((shapes.num_tokens, 1024), jnp.bfloat16, P("cp"))
    w = shapes.array((1024, 512 * shapes.num_ranks), jnp.bfloat16, P(None, "cp"))
    return Program(run, (x, w), (0, 1))


def matmul_reduce_scatter(shapes: Shapes, implementation: str = "xla") -> Program:
    options = {"axis_name": "cp", "implementation": implementation}
    fn = functools.partial(cpd.matmul_reduce_scatter, **options)
    run = on_ranks(shapes, lambda x, w: fn(x, w), (P(None, "cp"), P("cp")), P("cp"))
    x = shapes.array((shapes.num_tokens, 512 * shapes.num_ranks), jnp.bfloat16, P(None, "cp"))
    w = shapes.array((512 * shapes.num_ranks, 1024), jnp.bfloat16, P("cp"))
    return Program(run, (x, w), (0, 1))


def gemm(shapes: Shapes, implementation: str = "xla") -> Program:
    x, w = (shapes.on_one_device(*shape) for shape in ((TOKENS, 1024), (1024, 4096)))
    bias = shapes.on_one_device(4096)
    run = lambda x, w, bias: cpd.gemm(x, w, bias=bias, implementation=implementation)
    return Program(run, (x, w, bias), (0, 1, 2))


def gemm_of_8_bits(shapes: Shapes) -> Program:
    """Of MXFP8; its scales also go through the order in which tensor cores read them, and back."""
    mode = "MXFP8_1D_SCALING"

    def scales(q):
        padded = scaling.pad_scales(q.scale_inv, layout=q.layout)
        swizzled = scaling.swizzle_scales(padded, layout=q.layout)
        back = scaling.unswizzle_scales(swizzled, layout=q.layout)
        back = scaling.unpad_scales(back, shape=q.scale_inv.shape)
        return scaling.pad_scales(back, layout=q.layout)

    def run(x, w):
        x, w = scaling.quantize(x, mode), scaling.quantize(w, mode, layout="column")
        options = {"lhs_scale_inv": scales(x), "rhs_scale_inv": scales(w), "scaling_mode": mode}
        return cpd.gemm(x.data, w.data, implementation="xla", **options), scaling.dequantize(x)

    return Program(run, tuple(shapes.on_one_device(*x) for x in ((TOKENS, 1024), (1024, 4096))), ())


def grouped_gemm(shapes: Shapes) -> Program:
    x, w = (shapes.on_one_device(*shape) for shape in ((TOKENS, 1024), (8, 1024, 512)))
    sizes = shapes.on_one_device(8, dtype=jnp.int32)
    return Program(cpd.grouped_gemm, (x, w, sizes), (0, 1))


def _layer(shapes: Shapes, layer: Callable[..., Any]) -> Program:
    """A layer of `cpd.sequence` in placed order."""
    heads = shapes.tokens(HEADS, 64)
    gate = shapes.tokens(HEADS, dtype=jnp.float32)
    weights = shapes.array((4, 512), jnp.float32, P())
    features = shapes.tokens(512)
    arrays = {
        sequence.shift: (features,),
        sequence.causal_conv: (features, weights),
        sequence.gated_delta_rule: (heads, heads, heads, gate, gate),
        sequence.linear_attention: (heads, heads, heads, gate),
        sequence.linear_recurrence: (features, features),
    }[layer]
    if layer is sequence.shift:
        layer = functools.partial(layer, offset=-1)
    layer = functools.partial(layer, documents=shapes.placement.documents, **shapes.on_axis)
    return Program(lambda *x: layer(*x), arrays, tuple(range(len(arrays))))


def layer_on_pieces(shapes: Shapes) -> Program:
    """A layer of a rank, whose documents are found first."""
    options: dict[str, Any] = {"axis_name": "cp", "implementation": "xla"}

    def on_rank(x, documents):
        pieces = sequence.document_pieces(documents, **options)
        return sequence.linear_recurrence(x, x, documents=pieces, **options)

    def run(x, ids):
        documents = cpd.Documents(ids)
        specs = ROWS, documents.specs("cp")
        return on_ranks(shapes, on_rank, specs, ROWS)(x, documents)

    return Program(run, (shapes.tokens(512), shapes.ids), (0,))


_LAYERS = (
    *(sequence.shift, sequence.causal_conv, sequence.gated_delta_rule),
    *(sequence.linear_attention, sequence.linear_recurrence),
)
PROGRAMS: dict[str, Callable[[Shapes], Program]] = {
    "ring": functools.partial(attention, algorithm="ring"),
    "placed": functools.partial(attention, algorithm="placed"),
    "dispatch": functools.partial(dispatch, of_a_rank=True),
    "combine": functools.partial(combine, of_a_rank=True),
    "dispatch, global arrays": functools.partial(dispatch, of_a_rank=False),
    "combine, global arrays": functools.partial(combine, of_a_rank=False),
    "dispatch_qkv": dispatch_qkv,
    "combine_qkv": combine_qkv,
    "dispatch_start": functools.partial(projections, is_data=False),
    "combine_start": return_of_rows,
    "ring_exchange": exchange_in_ring,
    "chunk_exchange": exchange_chunks,
    "zigzag": functools.partial(attention, algorithm="zigzag"),
    **{
        f"{name}, data and tensor axes": functools.partial(on_three_axes, algorithm=name)
        for name in ("ring", "placed", "zigzag")
    },
    "hamilton": functools.partial(attention, algorithm="hamilton"),
    "ulysses": functools.partial(attention, algorithm="ulysses"),
    "ulysses, a ring outside": on_two_levels,
    "halo": functools.partial(attention, algorithm="halo", mask=masks.SlidingWindow(512)),
    "ring, ranges of queries": ring_of_trees,
    "selected attention": selected_attention,
    "selected attention, blocks": picked_blocks,
    "balanced, planned inside": functools.partial(attention, algorithm="balanced"),
    "balanced, planned before": balanced_with_a_plan,
    "local_attention": local_attention,
    "local_attention_backward": backward_alone,
    "merge_partials": merge_partials,
    "plan_attention": plan_attention,
    "metadata": metadata_of_shards,
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "gemm": gemm,
    "gemm, MXFP8": gemm_of_8_bits,
    "grouped_gemm": grouped_gemm,
    "ragged_all_to_all": ragged_all_to_all,
    "layer of experts": layer_of_experts,
    "all_gather_matmul, global arrays": all_gather_matmul_of_global_arrays,
    **{f"sequence.{x.__name__}": functools.partial(_layer, layer=x) for x in _LAYERS},
    "sequence.document_pieces": layer_on_pieces,
}
# By this package's own kernels: custom calls.
_OWN: dict[str, Callable[..., Program]] = {
    "dispatch": functools.partial(dispatch, of_a_rank=True),
    "combine": functools.partial(combine, of_a_rank=True),
    **{
        f"{name}, plan {'as data' if is_data else 'closed over'}": functools.partial(
            program, is_data=is_data
        )
        for name, program in {
            "dispatch_start beside two products": beside_two_products,
            "dispatch_start beside the projection of queries": projections,
        }.items()
        for is_data in (False, True)
    },
    "combine_start beside a product": return_of_rows,
    "layer of experts": layer_of_experts,
    "placed": functools.partial(attention, algorithm="placed"),
    "balanced, planned before": balanced_with_a_plan,
    "gemm": gemm,
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}
PROGRAMS_FOR_GPUS: dict[str, Callable[[Shapes], Program]] = {
    f"{name}, cuda_peer": functools.partial(program, implementation="cuda_peer")
    for name, program in _OWN.items()
} | {
    "documents": functools.partial(documents, backward=False),
    "documents, both passes": functools.partial(documents, backward=True),
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
# Public functions that are in no program. A module stands for all its functions.
NOT_COMPILED: dict[str, tuple[str, ...]] = {
    "computes on the host": (
        *("buffers", "cost", "cycles", "available_implementations", "choose_algorithm"),
        *("fit_plan_config", "fit_capacity", "stack_plans", "shift_documents", "plot_load"),
        "both_copies",
        "token_checksums",
    ),
    "needs the devices themselves": ("gpu", "initialize", "load_profile", "profiling"),
    "calls functions that are compiled, for a layer of another library": (
        *("equinox_attention", "flax_attention_fn", "maxtext_gemms"),
    ),
    "is part of compiled layers, with the caller's own function in them": ("recurrence",),
    "exchanges a few numbers, as dispatch does": ("check_tokens",),
    "makes random cases for tests": ("scenarios",),
}
