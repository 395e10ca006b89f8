"""Many exchanges in flight: in one program, in a chain of programs, from several Python threads."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import Metadata, combine, dispatch

W, S, T, F = 4, 5, 8, 6


def full_plan(rng, num_ranks, num_tokens) -> dict[str, Any]:
    """Returns a random permutation of row blocks: every rank sends and receives all its rows."""
    shards = (num_ranks, num_ranks)
    dst_rank = rng.permutation(np.repeat(np.arange(num_ranks), num_ranks)).reshape(shards)
    length = num_tokens // num_ranks
    dst_offset, num_recv = np.zeros(shards, int), np.zeros((num_ranks, num_ranks + 1), int)
    for r, s in np.ndindex(*shards):
        d = dst_rank[r, s]
        dst_offset[r, s] = num_recv[d, -1]
        num_recv[d, [r, -1]] += length
    return dict(
        dst_rank=dst_rank.astype(np.int32),
        dst_offset=dst_offset.astype(np.uint32),
        seq_len=np.full(shards, length, np.uint32),
        num_recv_tokens=num_recv.astype(np.uint32),
        num_seqs=np.full(num_ranks, num_ranks, np.int32),
        num_total_recv_tokens=num_recv[:, -1].astype(np.uint32),
        world_size=num_ranks,
    )


def test_many_independent_calls_in_one_program_and_loops_with_collectives():
    """More open exchanges than threads: a handler that waits for its peers would deadlock here."""
    rng = np.random.default_rng(15)
    plan = random_plan(rng, 8, S, T)
    capacity = 8 * T

    def local(x, m):
        calls = [dispatch(x + i, m, axis_name=AXIS, capacity=capacity) for i in range(24)]

        def step(carry, _):
            y = dispatch(carry, m, axis_name=AXIS, capacity=capacity)
            home = combine(y, m, axis_name=AXIS, num_tokens=T)
            turned = jax.lax.ppermute(home, AXIS, [(r, (r + 1) % 8) for r in range(8)])
            return turned + jax.lax.pmean(home, AXIS), None

        return sum(calls), jax.lax.scan(step, x, None, length=5)[0]

    run = on_ranks(local, mesh_of(8, [2, 0, 3, 1, 7, 5, 6, 4]))
    x = rng.integers(-4, 4, (8, T, 3)).astype(np.float32)
    got, looped = run(x, Metadata(**plan))
    expected = sum(dispatched(plan, x + i, capacity) for i in range(24))
    np.testing.assert_array_equal(got, expected)
    carry = x.astype(np.float64)
    for _ in range(5):
        home = combined(plan, dispatched(plan, carry, capacity), T)
        carry = np.roll(home, 1, axis=0) + home.mean(0)
    np.testing.assert_allclose(looped, carry, rtol=1e-5, atol=1e-5)


def test_a_long_chain_of_programs_that_donate_their_argument():
    """Every result has the shape, and possibly the memory, of the donated argument."""
    plan = full_plan(np.random.default_rng(9), W, T)
    place = NamedSharding(mesh_of(W), P(AXIS))
    metadata = jax.device_put(Metadata(**plan), place)
    move = lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=T)
    step = jax.jit(move, donate_argnums=0)
    # Created by XLA: a device array that shares memory with NumPy cannot be donated.
    x = first = jax.jit(
        lambda: jnp.arange(W * T * F, dtype=jnp.float32).reshape(-1, F), out_shardings=place
    )()
    expected = np.array(x).reshape(W, T, F)
    for _ in range(100):
        x = step(x, metadata)
        expected = dispatched(plan, expected, T)
    np.testing.assert_array_equal(np.asarray(x).reshape(W, T, F), expected)
    assert first.is_deleted()


def test_different_programs_from_several_threads():
    rng = np.random.default_rng(0)
    plans = [random_plan(rng, 8, S, T) for _ in range(3)]
    meshes = [mesh_of(8), mesh_of(8, list(range(7, -1, -1))), mesh_of(8, [3, 1, 7, 0, 6, 2, 5, 4])]
    x = rng.integers(-8, 9, (8, T, F)).astype(np.float32)
    outcomes = [[] for _ in plans]

    def work(number):
        plan, metadata = plans[number], Metadata(**plans[number])

        def there_and_back(x, m):
            y = dispatch(x, m, axis_name=AXIS, capacity=8 * T + number)
            return y + number, combine(y, m, axis_name=AXIS, num_tokens=T)

        run = on_ranks(there_and_back, meshes[number])
        in_flight = [run(x + i, metadata) for i in range(8)]
        for i, (sent, home) in enumerate(in_flight):
            y = dispatched(plan, x + i, 8 * T + number)
            is_right = np.array_equal(sent, y + number)
            outcomes[number].append(is_right and np.array_equal(home, combined(plan, y, T)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [[True] * 8] * len(plans)
