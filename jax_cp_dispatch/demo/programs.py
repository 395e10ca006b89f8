"""The programs of the demonstration, and their inputs."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch import combine, dispatch
from jax_cp_dispatch.attention import (
    context_parallel_attention,
    local_attention,
    local_attention_backward,
)
from jax_cp_dispatch.demo.packing import PackedDocuments
from jax_cp_dispatch.planner import Plan

AXIS = "cp"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 1, 32


def embed(packed: PackedDocuments, seed: int) -> tuple[np.ndarray, ...]:
    """Returns q, k, v and a cotangent `[1, T, heads, H]`: byte embeddings rotated by position."""
    rng = np.random.default_rng(seed)
    angles = packed.positions[..., None, None] / 10000 ** (np.arange(HEAD_DIM) / HEAD_DIM)
    arrays = []
    for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS):
        table = rng.normal(size=(256, num_heads, HEAD_DIM))
        arrays.append((table[packed.tokens] * np.cos(angles)).astype(np.float32))
    return tuple(arrays)


def random_received_rows(plan: Plan, mesh: Mesh) -> list[jax.Array]:
    """Returns random q, k, v and a cotangent of the size of all ranks' receive buffers."""
    rng = np.random.default_rng(0)
    queries, keys = (plan.q_capacity, NUM_HEADS), (plan.kv_capacity, NUM_KV_HEADS)
    return [
        jax.device_put(
            rng.normal(size=(plan.world_size, *rows, HEAD_DIM)).astype(np.float32),
            NamedSharding(mesh, P(AXIS)),
        )
        for rows in (queries, keys, keys, queries)
    ]


def attention_and_gradients(mesh: Mesh) -> Any:
    """Returns one jitted program: forward and backward pass over all devices."""

    @jax.jit
    def program(q, k, v, dout, plan):
        def attend(q, k, v):
            return context_parallel_attention(
                q, k, v, mesh=mesh, axis_name=AXIS, algorithm="balanced", plan=plan
            )

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(dout)

    return program


def movement_alone(mesh: Mesh) -> Any:
    """Returns a program with only the exchanges of a forward and a backward pass."""

    def local(q, k, v, plan):
        q, k, v = (x[0] for x in (q, k, v))
        send = partial(dispatch, axis_name=AXIS)
        return_rows = partial(combine, axis_name=AXIS, num_tokens=len(q))
        received_q = send(q, plan.q_metadata, capacity=plan.q_capacity)
        received_kv = send((k, v), plan.kv_metadata, capacity=plan.kv_capacity)
        out = return_rows(received_q, plan.q_metadata)
        dout = send(out, plan.q_metadata, capacity=plan.q_capacity)
        dq, (dk, dv) = (
            return_rows(dout, plan.q_metadata),
            return_rows(received_kv, plan.kv_metadata),
        )
        return dq[None], dk[None], dv[None]

    rows = P(None, AXIS)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, P(AXIS)), out_specs=rows)
    )


def attention_alone(mesh: Mesh) -> Any:
    """Returns a program with only local attention, forward and backward, on received rows."""

    def local(q, k, v, dout, plan):
        start, end = (x[None] for x in plan.local_ranges(jax.lax.axis_index(AXIS)))
        out, lse = local_attention(q, k, v, start, end)
        return local_attention_backward(q, k, v, start, end, out, lse, dout)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    )
