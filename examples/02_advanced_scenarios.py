"""Documents across ranks, uneven loads, empty ranks, and plans that exceed their capacity.

Each scenario verifies itself: it compares balanced attention with dense attention, and errors with
their expected messages.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(8)  # virtual ones, before JAX starts

W, T, AXIS = 8, 64, "cp"
MESH = Mesh(np.array(jax.devices()), (AXIS,))
# Capacities that fit every scenario, so that all share one compiled program.
CONFIG = cpd.PlanConfig(16, 2 * T + 16, W * T, 32, 32, max_pieces=48)


def pack(*lengths: int) -> np.ndarray:
    """Returns segment ids [1, W * T] of consecutive documents; the rest is padding."""
    segment_ids = np.zeros((1, W * T), np.int32)
    ends = np.cumsum(lengths)
    for document, (length, end) in enumerate(zip(lengths, ends, strict=True), start=1):
        segment_ids[0, end - length : end] = document
    return segment_ids


def with_gradients(attend, q, k, v, g):
    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(g)


@jax.jit
def balanced(documents, *qkvg):
    options = {"mesh": MESH, "axis_name": AXIS, "algorithm": "balanced", "documents": documents}
    return with_gradients(partial(cpd.context_parallel_attention, **options), *qkvg)


@jax.jit
def dense(segment_ids, *qkvg):
    return with_gradients(partial(dense_attention, segment_ids), *qkvg)


def dense_attention(segment_ids, q, k, v):
    same = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids[:, :, None] > 0)
    mask = (same & jnp.tril(jnp.ones(same.shape[1:], bool)))[:, None]
    logits = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1]), -jnp.inf)
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits, -1e30)), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def attend_and_verify(title: str, segment_ids: np.ndarray) -> None:
    """Plans, computes attention forward and backward, compares, and prints balance and movement."""
    plan = cpd.plan_attention(segment_ids, None, world_size=W, config=CONFIG)
    qkvg = np.random.default_rng(0).normal(size=(4, 1, W * T, 2, 16)).astype(np.float32)
    documents = cpd.Documents(segment_ids).with_plan(plan)
    for got, want in zip(balanced(documents, *qkvg), dense(segment_ids, *qkvg), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    print(
        f"{title:<34} work max/mean {float(plan.imbalance_before):.2f} -> "
        f"{float(plan.imbalance):.2f}, moved {int(plan.num_q_tokens_moved)} queries, "
        f"{int(plan.num_kv_tokens_moved)} keys: verified"
    )


def refused(title: str, error: type[Exception] | tuple[type[Exception], ...], run) -> None:
    """Prints the error of an input that must be rejected."""
    try:
        jax.block_until_ready(run())
    except error as found:
        print(f"{title:<34} rejected: {str(found).splitlines()[0]}")
        return
    raise SystemExit(f"{title}: was not rejected")


def capacity_limits() -> None:
    forward, _ = cpd.compute_metadata(np.full((W, 1), T), np.zeros((W, 1), np.int32))  # all to 0

    def send(capacity):
        move = jax.shard_map(
            lambda x, m: cpd.dispatch(x, m, axis_name=AXIS, capacity=capacity),
            mesh=MESH,
            in_specs=P(AXIS),
            out_specs=P(AXIS),
        )
        return jax.jit(move)(np.ones((W * T, 2), np.float32), forward)

    # With one device per process JAX raises ValueError, otherwise JaxRuntimeError.
    errors = (jax.errors.JaxRuntimeError, ValueError)
    refused("all to one rank, buffer too small", errors, lambda: send(T))
    assert float(send(W * T).sum()) == W * T * 2  # with sufficient capacity it then runs
    small = cpd.PlanConfig(block=16, kv_capacity=T)
    refused(
        "plan larger than its capacity",
        ValueError,
        lambda: cpd.plan_attention(pack(W * T), None, world_size=W, config=small),
    )


def main() -> None:
    attend_and_verify("one document across all ranks", pack(W * T))
    attend_and_verify("documents across ranks", pack(100, 40, 200, 5, 90, 60))
    attend_and_verify("uneven: one long, many short", pack(256, *[8] * 32))
    attend_and_verify("empty ranks", pack(70, 30))
    attend_and_verify("nothing but padding", pack())
    capacity_limits()


if __name__ == "__main__":
    main()
