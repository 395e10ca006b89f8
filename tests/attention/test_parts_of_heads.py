"""Placed and balanced attention in two parts of heads, as between GPUs: the bits of one part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Documents, context_parallel_attention, place_tokens, plan_attention
from jax_cp_dispatch._ranks.implementations import moves_beside_work
from jax_cp_dispatch.attention.algorithms import parts_of_heads

W, LENGTHS, HEAD_SIZE = 4, [30, 7, 50, 41], 8
HEADS, KV_HEADS = 6, 3  # parts of 2 and 4 query heads
IDS = np.repeat(np.arange(1, 5), LENGTHS)[None]
PLANNED = Documents(IDS).with_plan(plan_attention(IDS, world_size=W))


@pytest.mark.parametrize("algorithm", ["placed", "balanced"])
def test_two_parts_give_the_bits_of_one(algorithm, monkeypatch):
    rng = np.random.default_rng(0)
    shapes = [(1, sum(LENGTHS), n, HEAD_SIZE) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [rng.normal(size=shape).astype(jnp.bfloat16) for shape in shapes]
    sink = jnp.asarray(rng.normal(size=HEADS), jnp.float32)
    if algorithm == "placed":
        documents = place_tokens([LENGTHS], world_size=W).documents
    else:
        documents = PLANNED

    def run(q, k, v, dout, deadline):
        def attend(*qkv):
            return context_parallel_attention(
                *qkv, mesh=mesh_of(W), axis_name=AXIS, algorithm=algorithm,
                documents=documents, sink=sink, return_lse=True, return_max_logits=True,
                deadline=deadline,
            )  # fmt: skip

        (out, lse, peak), transpose = jax.vjp(attend, q, k, v)
        return out, lse, peak, transpose((dout, jnp.ones_like(lse), jnp.zeros_like(peak)))

    results = []
    for is_cut in (False, True):
        monkeypatch.setattr(parts_of_heads, "moves_beside_work", lambda _, is_cut=is_cut: is_cut)
        # With another deadline the function is traced again.
        traced = jax.jit(run, static_argnums=4).trace(*arrays, 60.0 + is_cut)
        num_starts = str(traced.jaxpr).count("exchange_start[")
        assert num_starts == ({"placed": 2, "balanced": 4}[algorithm] if is_cut else 0)
        if algorithm == "balanced":  # its keys are cut by the same function as those of "placed"
            results.append(traced.lower().compile()(*arrays))
    if results:
        jax.tree.map(np.testing.assert_array_equal, *results)


def test_only_implementations_with_two_calls_split():
    """CPU devices and XLA's collectives have one call."""
    split = {name: moves_beside_work(name) for name in ("cuda_peer", "cuda_ipc", "nvshmem")}
    assert all(split.values())
    assert not any(map(moves_beside_work, ("in_process", "shared_memory", "xla", None)))


def test_one_kv_head_is_one_part(monkeypatch):
    monkeypatch.setattr(parts_of_heads, "moves_beside_work", lambda _: True)
    q, k = (jnp.zeros((1, sum(LENGTHS), n, HEAD_SIZE)) for n in (4, 1))
    attend = lambda q, k: context_parallel_attention(
        q, k, k, mesh=mesh_of(W), axis_name=AXIS, algorithm="balanced", documents=PLANNED
    )
    assert "exchange_start" not in str(jax.make_jaxpr(attend)(q, k))
