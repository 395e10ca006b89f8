"""Plans inside `jit` reserve the keys that a mask can need: no batch needs more."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cp_dispatch import PlanConfig, plan_attention
from jax_cp_dispatch.masks import BlockCausal, Causal, Chunked, SlidingWindow
from jax_cp_dispatch.planning.balance import balance_blocks
from jax_cp_dispatch.planning.block_grid import BlockGrid
from jax_cp_dispatch.planning.key_limit import KeyLimit, kv_bound

W = 8


def test_the_bound_of_published_sizes():
    """Blocks of 128 rows need 4 blocks before them for a window of 512: 5 times the rank's rows."""
    grid, everything = BlockGrid(1, W, 8192, 128), W * 8192
    assert kv_bound(grid, SlidingWindow(512)) == kv_bound(grid, Chunked(513)) == 5 * 8192
    assert kv_bound(grid, SlidingWindow(128, 128)) == 3 * 8192
    for mask in (Causal(), BlockCausal(4), SlidingWindow(None, 4), SlidingWindow(4096)):
        assert kv_bound(grid, mask) == everything


def lengths(rng, num_tokens, size):
    """Documents of lengths that make blocks see far for little work, beside others."""
    kind = rng.integers(4)
    found = rng.integers(1, 4 * size, num_tokens)
    if kind == 0:
        found[rng.random(num_tokens) < 0.7] = 1
    elif kind == 1:
        found[:] = rng.integers(size, 2 * size)
    elif kind == 2:
        found[: rng.integers(num_tokens)] = 1
    return found


@pytest.mark.parametrize(
    "mask, grid",
    [
        (SlidingWindow(6, 3), BlockGrid(2, W, 30, 4)),  # blocks of unequal length
        (Chunked(12), BlockGrid(2, W, 48, 8)),
    ],
    ids=str,
)
def test_no_batch_needs_more(mask, grid):
    config, bound = PlanConfig(grid.block), kv_bound(grid, mask)
    assert bound < W * grid.rows

    @jax.jit
    def run(ids):
        plan = plan_attention(ids, world_size=W, mask=mask, config=config)
        assert plan.kv_capacity == bound
        return plan.kv_metadata.num_total_recv_tokens, plan.fits

    rng, columns = np.random.default_rng(), W * grid.columns
    for _ in range(40):
        rows = []
        for _ in range(grid.batch):
            ids = np.repeat(np.arange(1, columns + 1), lengths(rng, columns, 17))[:columns]
            ids[rng.integers(columns // 2, 2 * columns) :] = 0
            rows.append(ids)
        received, fits = run(np.array(rows, np.int32))
        assert fits and (received <= bound).all()


def test_an_assignment_keeps_its_limit():
    """Of any costs and keys: receivers, and single moves, leave at home what exceeds it."""
    num_blocks, exceeded, rng = 12, 0, np.random.default_rng()

    @jax.jit
    def assign(cost, begin, limit):
        block = jnp.arange(W * num_blocks, dtype=jnp.int32)
        piece, rows = block // num_blocks, jnp.ones((1, W, num_blocks), jnp.int32)
        keys: Any = KeyLimit(begin, block + 1, cost.reshape(-1) > 0, piece, limit)
        options: Any = {"row_limit": 3 * num_blocks, "tolerance": 0.0}
        return [balance_blocks(cost, rows, keys=x, **options) for x in (keys, None)]

    for _ in range(60):
        cost = rng.integers(0, 100, (1, W, num_blocks)) ** rng.integers(1, 4)
        cost[rng.random(cost.shape) < rng.random()] = 0
        cost[:, rng.permutation(W)[: rng.integers(W)]] //= 50
        block = np.arange(W * num_blocks)
        reach = rng.integers(1, 6)
        begin = np.maximum.accumulate(np.maximum(block - rng.integers(0, reach + 1, block.size), 0))
        limit = num_blocks + reach + rng.integers(num_blocks)
        arrays = (np.asarray(x, np.int32) for x in (cost, begin, limit))
        ranks = [np.asarray(x).reshape(-1) for x in assign(*arrays)]
        most = []
        for rank in ranks:
            seen = np.zeros((W, block.size), bool)
            for i in np.flatnonzero(cost.reshape(-1)):
                seen[rank[i], begin[i] : i + 1] = True
            most.append(seen.sum(1).max())
        assert most[0] <= limit
        exceeded += most[1] > limit
    assert exceeded  # without the limit
