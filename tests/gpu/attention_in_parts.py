"""Placed and balanced attention of one process of worker.py: parts of heads against one part, whose
results are the same bit for bit, and against NumPy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_oracle import attention

import jax_cp_dispatch as cpd
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.attention.algorithms import parts_of_heads
from jax_cp_dispatch.gpu import raise_gpu_errors

HEADS, KV_HEADS, HEAD_SIZE, ROUNDS = 8, 4, 64, 4
# Exchanges beside a program: of each part but the last one, before and after the computation.
BESIDE = {"placed": 1 + 1, "balanced": 2 + 2}


def attend(algorithm: str, num_ranks: int, rank: int, place: Callable, read: Callable,
           on_ranks: Callable, name: dict[str, Any]) -> None:  # fmt: skip
    """Compares outputs and gradients of two parts with those of one.

    Args:
      algorithm: "placed" or "balanced".
      num_ranks, rank: the number of processes, and the index of this one.
      place: makes a global array from one with a rank dimension.
      read: returns this process's part of a global array.
      on_ranks: makes a program over the mesh from a function of local arrays.
      name: axis_name, implementation and deadline.
    """
    tokens = 256 * num_ranks
    lengths = [tokens - 3 * 100, 37, 100, 163]
    ids = np.repeat(np.arange(1, 5), lengths)[None]
    if algorithm == "placed":
        placement = cpd.place_tokens([lengths], world_size=num_ranks)
        documents, order = placement.documents, lambda x: np.asarray(placement.apply(x))
        run = partial(cpd.context_parallel_attention, algorithm="placed")
    else:
        plan = cpd.plan_attention(ids, world_size=num_ranks)
        documents, order = cpd.Documents(ids).with_plan(plan), np.asarray
        run = partial(cpd.context_parallel_attention, algorithm="balanced")
    random = np.random.default_rng(0)

    static: dict[str, Any] = {"order": documents.order, "columns": tokens}

    def with_gradients(planned, *arrays):
        plans, ids, positions = planned  # arrays of a rank have no batch dimension
        own = cpd.Documents.in_order(ids[None], positions[None], plans, **static)
        q, k, v, dout = (x[None] for x in arrays)
        out, transpose = jax.vjp(lambda q, k, v: run(q, k, v, documents=own, **name), q, k, v)
        return [x[0] for x in (out, *transpose(dout))]

    by_rank = lambda x: place(np.asarray(x).reshape(num_ranks, -1))
    plans = jax.tree.map(lambda x: place(np.asarray(x)[:, None]), documents.plans)
    planned = plans, by_rank(documents.segment_ids), by_rank(documents.positions)
    programs = []
    for is_cut in (False, True):
        parts_of_heads.moves_beside_work = lambda _, is_cut=is_cut: is_cut
        program = on_ranks(lambda planned, *arrays: with_gradients(planned, *arrays))
        programs.append(
            program.lower(planned, *_arrays(random, num_ranks, order, place)[1]).compile()
        )
    for _ in range(ROUNDS):
        qkv, arrays = _arrays(random, num_ranks, order, place)
        before = runtime.cuda.num_exchanges_beside_programs()
        one, two = ([read(x) for x in program(planned, *arrays)] for program in programs)
        raise_gpu_errors()
        assert runtime.cuda.num_exchanges_beside_programs() - before == BESIDE[algorithm]
        for whole, parts in zip(one, two, strict=True):
            np.testing.assert_array_equal(whole, parts)
        start = np.cumsum([0, *lengths])[ids - 1]
        q, k, v = qkv
        exact, _ = attention(q, k, v, start, np.arange(tokens)[None] + 1)
        mine = order(exact.astype(np.float32)).reshape(num_ranks, -1, HEADS, HEAD_SIZE)[rank]
        np.testing.assert_allclose(two[0].astype(np.float32), mine, atol=0.02, rtol=0.02)


def _arrays(random: Any, num_ranks: int, order: Callable, place: Callable) -> tuple[Any, Any]:
    """Returns q, k and v in document order, and the operands as global arrays."""
    shapes = [(1, 256 * num_ranks, n, HEAD_SIZE) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [random.normal(size=shape).astype(jnp.bfloat16) for shape in shapes]
    split = lambda x: place(order(x).reshape(num_ranks, 256, *x.shape[2:]))
    return [x.astype(np.float32) for x in arrays[:3]], [split(x) for x in arrays]
