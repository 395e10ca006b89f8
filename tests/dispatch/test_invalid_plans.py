"""Plans that do not fit the batch, or each other: all ranks get one error that names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failing import CAPACITY, METADATA, PLAN, F, S, T, W, X, all_say, send, spoiled
from jax.sharding import NamedSharding, PartitionSpec as P
from movement_oracle import dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import (
    Metadata,
    PlanConfig,
    compute_metadata,
    dispatch_qkv,
    plan_attention,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")


def test_metadata_of_another_plan_on_one_rank():
    """Each rank passes its own slice: here rank 4 passes that of another batch."""
    other = Metadata(**random_plan(np.random.default_rng(7), W, S, T))

    def mixed(mine, others):
        mine = np.array(mine)
        mine[4] = others[4]
        return mine

    all_say(
        on_ranks(send, mesh_of(W)),
        X,
        jax.tree.map(mixed, METADATA, other),
        match=r"rank \d expects \d+ tokens from rank \d \(num_recv_tokens\) but rank \d's slots",
    )


def test_plan_made_under_jit_that_needs_more_slots_than_its_bound():
    """The reverse plan is truncated, which the reverse exchange detects."""

    def there_and_back(x, seq_len, destinations):
        forward, reverse = compute_metadata(seq_len, destinations, max_recv_seqs=W)
        return send(send(x, forward), reverse, capacity=T)

    seq_len = np.full((W, 2), T // 2, np.int32)
    spread = (np.arange(2 * W).reshape(W, 2) % W).astype(np.int32)
    copies = lambda a: np.broadcast_to(a, (W, *a.shape))
    run = on_ranks(there_and_back, mesh_of(W))
    np.testing.assert_array_equal(run(X, copies(seq_len), copies(spread)), X)
    all_say(
        run,
        X,
        copies(seq_len),
        copies(np.full((W, 2), 5, np.int32)),  # rank 5 receives 16 shards; its plan has 8 slots
        match=r"rank \d expects \d tokens from rank 5 .*a static bound \(max_recv_seqs.*too small",
    )


def test_attention_plan_made_under_jit_that_needs_more_rows_than_its_bound():
    config = PlanConfig(block=4, kv_capacity=12)

    def local(x, segment_ids):
        plan = plan_attention(segment_ids, world_size=W, config=config)
        q, kv = dispatch_qkv(
            x,
            x,
            plan.q_metadata,
            plan.kv_metadata,
            axis_name=AXIS,
            q_capacity=plan.q_capacity,
            kv_capacity=plan.kv_capacity,
        )
        return jnp.sum(q) + jnp.sum(kv)

    run = on_ranks(local, mesh_of(W))
    one_each = np.repeat(np.arange(1, W + 1, dtype=np.int32), T)[None]
    copies = lambda a: np.broadcast_to(a, (W, *a.shape))
    run(X, copies(one_each)).block_until_ready()
    all_say(
        run,
        X,
        copies(np.ones_like(one_each)),  # one document over all ranks
        match=r"dispatch_qkv over axis 'cp': rank \d would receive \d+ tokens but "
        r"kv_capacity is 12\. Pass kv_capacity>=",
    )


def test_global_arrays_under_plain_jit():
    mesh, (bad, message) = mesh_of(W), spoiled()
    x = jax.device_put(X.reshape(W * T, F), NamedSharding(mesh, P(AXIS)))
    run = jax.jit(lambda x, m: send(x, m, mesh=mesh))
    all_say(run, x, bad, match=message)
    expected = dispatched(PLAN, X, CAPACITY).reshape(-1, F)
    np.testing.assert_array_equal(run(x, METADATA), expected)
