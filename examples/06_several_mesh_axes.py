"""Shards batch, sequence and heads at once, and pipeline stages; counts all-gathers.

Compares every program with dense attention, and searches its compiled text for all-gathers.
"""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(8)  # virtual ones, before JAX starts

B, T, N, K, H = 2, 64, 4, 1, 16  # one KV head for all query heads, repeated for the devices of tp
SHARDED, WHOLE_HEADS = P("data", "cp", "tp"), P("data", "cp")
SEGMENT_IDS = np.stack([np.repeat([1, 2, 0], [40, 20, 4]), np.repeat([1, 2, 3], [10, 50, 4])])


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def draw(seed: int) -> list[np.ndarray]:
    """Draws q, k, v and the cotangent of the output."""
    random = np.random.default_rng(seed)
    return [random.normal(size=(B, T, heads, H)).astype("f") for heads in (N, K, K, N)]


def with_gradients(attend, q, k, v, g):
    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(g)


def dense(q, k, v):
    same = (SEGMENT_IDS[:, :, None] == SEGMENT_IDS[:, None]) & (SEGMENT_IDS[:, :, None] > 0)
    mask = (same & np.tri(T, dtype=bool))[:, None]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    logits = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H), -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(mask, jax.nn.softmax(logits), 0), v)


def verify(results: Any, expected: Any) -> None:
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def run(title: str, mesh, arrays, **options: Any) -> tuple[int, Any]:
    """Compiles and runs forward and backward; returns the number of all-gathers and the results."""
    attend = partial(
        cpd.context_parallel_attention,
        mesh=mesh,
        axis_name="cp",
        algorithm="zigzag",
        segment_ids=SEGMENT_IDS,
        **options,
    )
    sharded = [
        jax.device_put(x, NamedSharding(mesh, SHARDED if x.shape[2] == N else WHOLE_HEADS))
        for x in arrays
    ]
    compiled = jax.jit(partial(with_gradients, attend)).lower(*sharded).compile()
    num_gathers = str(compiled.as_text()).count(" all-gather(")
    results = compiled(*sharded)
    print(f"{title}: {num_gathers} all-gathers, dq is {results[1].sharding.spec}")
    return num_gathers, results


def main() -> None:
    names = ("data", "cp", "tp")
    arrays = draw(0)
    expected = with_gradients(dense, *arrays)
    automatic = mesh_of((2, 2, 2), names, AxisType.Auto)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        many, results = run("automatic axes, not named", automatic, arrays)
    verify(results, expected)
    print(*(f"  warned: {x.message}" for x in warned), sep="\n")
    assert ["batch_axis" in str(warned[0].message), "head_axis" in str(warned[1].message)] == [
        True
    ] * 2

    named = {"batch_axis": "data", "head_axis": "tp"}
    few, results = run("automatic axes, named", automatic, arrays, **named)
    verify(results, expected)
    assert few < many and tuple(results[1].sharding.spec)[:3] == tuple(SHARDED)

    explicit = mesh_of((2, 2, 2), names, AxisType.Explicit)
    _, results = run("explicit axes, read from the types", explicit, arrays)
    verify(results, expected)
    assert tuple(results[1].sharding.spec)[:3] == tuple(SHARDED)

    # A pipeline: stages are the leading dimension, sharded over a separate mesh axis.
    stages = mesh_of((2, 4), ("stage", "cp"), AxisType.Auto)
    attend = partial(
        cpd.context_parallel_attention,
        mesh=stages,
        axis_name="cp",
        algorithm="zigzag",
        segment_ids=SEGMENT_IDS,
    )
    per_stage = [draw(seed) for seed in (1, 2)]
    stacked = [np.stack(x) for x in zip(*per_stage, strict=True)]
    placed = jax.device_put(stacked, NamedSharding(stages, P("stage", None, "cp")))
    over_stages = jax.vmap(attend, spmd_axis_name="stage")
    results = jax.jit(partial(with_gradients, over_stages))(*placed)
    for stage, arrays in enumerate(per_stage):
        verify([x[stage] for x in results], with_gradients(dense, *arrays))
    assert all(x.sharding.spec[0] == "stage" for x in results)
    print("two stages, each on its own devices: verified")


if __name__ == "__main__":
    main()
