"""The programs that are compiled of attention: whole calls, and the functions of a rank."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from shapes import HEAD_SIZE, HEADS, KV_HEADS, TOKENS, Program, Shapes

import jax_cp_dispatch as cpd
from jax_cp_dispatch import masks, selected
from jax_cp_dispatch.attention import local_attention_backward


def attention(
    shapes: Shapes, algorithm: str, implementation: str = "xla", mask: masks.Mask | None = None
) -> Program:
    options: dict[str, Any] = {"algorithm": algorithm, "mask": mask, **shapes.on_axis}
    options["implementation"] = implementation

    def run(q, k, v, ids):
        return cpd.context_parallel_attention(q, k, v, segment_ids=ids, **options)

    if algorithm == "placed":
        run = functools.partial(
            cpd.context_parallel_attention, documents=shapes.placement.documents, **options
        )
        return Program(run, shapes.qkv, (0, 1, 2))
    return Program(run, (*shapes.qkv, shapes.ids), (0, 1, 2))


def on_three_axes(shapes: Shapes, algorithm: str) -> Program:
    """Groups of ranks for the rows of a batch, and heads of several devices, as in training."""
    data = 2 if len(shapes.devices) >= 8 else 1
    return attention(Shapes(shapes.devices, data=data, tensor=2), algorithm)


def on_two_levels(shapes: Shapes) -> Program:
    """Pairs of devices share heads, and a ring is between the pairs."""
    mesh = Mesh(np.array(shapes.devices).reshape(-1, 2), ("between", "inside"))
    axes = mesh.axis_names
    sharding = NamedSharding(mesh, P(None, axes))
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def run(q, k, v, ids):
        options: dict[str, Any] = {"algorithm": cpd.Ulysses(outer=cpd.Ring()), "mesh": mesh}
        options |= {"axis_name": axes, "implementation": "xla"}
        return cpd.context_parallel_attention(q, k, v, segment_ids=ids, **options)

    return Program(run, (*map(like, shapes.qkv), like(shapes.ids)), (0, 1, 2))


def ring_of_trees(shapes: Shapes) -> Program:
    """A mask of arrays, whose keys have ranges of queries."""

    def run(q, k, v, ids, subtree_end):
        mask = masks.Ranges(jnp.zeros_like(ids), ids + 1, jnp.zeros_like(ids), subtree_end)
        options: dict[str, Any] = {"algorithm": "ring", "mask": mask}
        return cpd.context_parallel_attention(q, k, v, **options, **shapes.on_axis)

    return Program(run, (*shapes.qkv, shapes.ids, shapes.ids), (0, 1, 2))


def selected_attention(shapes: Shapes) -> Program:
    """DeepSeek-V3.2 with 8 heads: picks, absorbed latent attention over them, the index's loss."""
    documents = shapes.placement.documents
    where: dict[str, Any] = {"algorithm": "placed", "documents": documents, **shapes.on_axis}

    def run(q, latents, q_index, k_index, weights):
        picks = selected.select_keys(q_index, k_index, weights, num_keys=512, **where)
        mask = masks.Selected(picks, order=documents.order)
        out = cpd.context_parallel_attention(q, latents, value_size=512, mask=mask, **where)
        return out, selected.index_loss(q_index, k_index, weights, q, latents, mask=mask, **where)

    of_index = shapes.tokens(64, 128), shapes.tokens(128), shapes.tokens(64)
    arrays = shapes.tokens(HEADS, 576), shapes.tokens(1, 576), *of_index
    return Program(run, arrays, tuple(range(len(arrays))))


def picked_blocks(shapes: Shapes) -> Program:
    """MiniMax-M3 with 8 heads: picks of blocks, and attention over them."""
    documents = shapes.placement.documents
    where: dict[str, Any] = {"algorithm": "placed", "documents": documents, **shapes.on_axis}

    def run(q, k, v, q_index, k_index):
        options = {"num_keys": 16, "block": 128, "relu": False}
        picks = selected.select_keys(q_index, k_index, **options, **where)
        mask = masks.Selected(picks, block=128, order=documents.order)
        return cpd.context_parallel_attention(q, k, v, mask=mask, **where)

    of_index = (shapes.tokens(KV_HEADS, 1, 128), shapes.tokens(KV_HEADS, 128))
    return Program(run, (*shapes.qkv, *of_index), (0, 1, 2))


def balanced_plan(shapes: Shapes) -> cpd.Plan:
    return cpd.plan_attention(lengths=shapes.lengths, world_size=shapes.num_ranks)


def balanced_with_a_plan(shapes: Shapes, implementation: str = "xla") -> Program:
    attend = functools.partial(
        cpd.context_parallel_attention,
        algorithm="balanced",
        documents=cpd.Documents(shapes.segment_ids).with_plan(balanced_plan(shapes)),
        **(shapes.on_axis | {"implementation": implementation}),
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


def documents(shapes: Shapes, backward: bool) -> Program:
    """Local attention of 8192 tokens in documents, the measured case; `backward`: both passes."""
    like = functools.partial(shapes.on_one_device, 1, 8192)
    q, kv, ids = like(32, 128), like(8, 128), like(dtype=jnp.int32)

    def attend(q, k, v, start, end):
        return cpd.local_attention(q, k, v, start, end, out_dtype=q.dtype)[0]

    def both(q, k, v, start, end, dout):
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, start, end), q, k, v)
        return out, pull_back(dout)

    arrays = (q, kv, kv, ids, ids)
    return Program(both, (*arrays, q), ()) if backward else Program(attend, arrays, ())


def backward_alone(shapes: Shapes) -> Program:
    like = functools.partial(shapes.on_one_device, 1)
    q, kv = like(TOKENS, HEADS, HEAD_SIZE), like(TOKENS, KV_HEADS, HEAD_SIZE)
    ids, lse = like(TOKENS, dtype=jnp.int32), like(HEADS, TOKENS, dtype=jnp.float32)
    run = local_attention_backward
    return Program(run, (q, kv, kv, ids, ids, q, lse, q), ())


def merge_partials(shapes: Shapes) -> Program:
    out = shapes.on_one_device(1, TOKENS, HEADS, HEAD_SIZE, dtype=jnp.float32)
    lse = shapes.on_one_device(1, HEADS, TOKENS, dtype=jnp.float32)
    return Program(cpd.merge_partials, (out, lse, out, lse), (0, 1, 2, 3))
