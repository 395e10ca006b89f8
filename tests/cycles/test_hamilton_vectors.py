"""Ring, zigzag and Hamilton attention against recorded results of another implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hamilton_vectors import recorded, recorded_attention
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Documents, context_parallel_attention, merge_partials
from jax_cp_dispatch.attention.rotating.key_chunks import Chunking
from jax_cp_dispatch.documents import zigzag_permutation
from jax_cp_dispatch.documents.layouts import zigzag_layout


def by_rank(name):
    ranks = recorded(name).get("ranks") or recorded(name)
    return [ranks[str(rank)] for rank in range(len(ranks))]


@pytest.mark.parametrize(
    "name, algorithm, causal",
    [
        ("forward_ring_8", "ring", False),
        ("forward_zigzag_4", "zigzag", True),
        ("forward_zigzag_4", "hamilton", True),
    ],
)
def test_recorded_attention(name, algorithm, causal):
    vector = recorded_attention(name)
    q, k, v, want = (vector[key] for key in ("q", "k", "v", "out_full"))
    num_ranks, documents = len(vector["local_out"]), Documents(np.ones(q.shape[:2], np.int32))
    if causal:
        documents = documents.zigzag(num_ranks)
    rows, mask = P(None, AXIS), "causal" if causal else "full"
    attend = jax.shard_map(
        lambda q, k, v, documents: context_parallel_attention(
            q, k, v, axis_name=AXIS, algorithm=algorithm, mask=mask, documents=documents
        ),
        mesh=mesh_of(num_ranks),
        in_specs=rows,
        out_specs=rows,
    )
    got = np.asarray(jax.jit(attend)(*documents.apply((q, k, v)), documents))
    np.testing.assert_allclose(got, documents.apply(want), rtol=1e-5, atol=1e-5)
    for rank, part in enumerate(np.split(got, num_ranks, axis=1)):
        np.testing.assert_allclose(part.ravel(), vector["local_out"][rank], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_recorded_zigzag(num_ranks):
    want = by_rank(f"placement_zigzag_ring_{num_ranks}")
    order = zigzag_permutation(np.size(want), num_ranks)
    np.testing.assert_array_equal(order.reshape(num_ranks, -1), want)


def test_recorded_chunks():
    """The rows and the key chunks of each rank, for causal attention over 8."""
    placement = zigzag_layout(8, 14)
    chunking = Chunking(placement, 7)
    for rank, want in enumerate(by_rank("placement_causal_8")):
        tokens = np.asarray(placement.positions(rank))
        np.testing.assert_array_equal(tokens, want["q"])
        chunks = chunking.cut(jnp.float32(tokens)[None, :, None, None])
        np.testing.assert_array_equal(chunks[:, 0, :, 0], want["kv_chunks"])


def test_recorded_merge():
    vector = recorded("out_lse_merge")
    names = ("block_out1", "block_lse1_BNS", "block_out2", "block_lse2_BNS")
    out, lse = merge_partials(*(jnp.float32(vector[name]) for name in names))
    np.testing.assert_allclose(out, vector["out"], rtol=1e-6, atol=1e-6)
    want = np.moveaxis(np.array(vector["lse_BSN1"])[..., 0], 1, 2)
    np.testing.assert_allclose(lse, want, rtol=1e-6, atol=1e-6)
