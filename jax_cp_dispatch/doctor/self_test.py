"""Tests every transport that is available here."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch import combine, dispatch
from jax_cp_dispatch._ranks.implementations import available_implementations
from jax_cp_dispatch.doctor.machine import Finding
from jax_cp_dispatch.metadata import compute_metadata
from jax_cp_dispatch.scenarios import orchestrate_simulate

_AXIS = "cp"
_SLOTS, _REPLICAS, _FEATURES = 4, 2, 8


def try_implementations() -> Iterator[Finding]:
    """Yields one finding per transport that can run in this process."""
    for name, implementation in available_implementations().items():
        if not implementation.available:
            yield Finding(f"transport {name}", implementation.reason, "missing")
            continue
        start = time.perf_counter()
        try:
            wrong = move(name)
        except Exception as error:  # any error is a finding
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        seconds = time.perf_counter() - start
        if wrong:
            yield Finding(f"transport {name}", wrong, "wrong", "Report this with the output.")
        else:
            count = jax.device_count()
            yield Finding(
                f"transport {name}",
                f"dispatch and combine are correct on {count} ranks, {seconds:.1f} s",
            )


def move(name: str) -> str:
    """Sends random shards to random ranks and back; returns the error found here, or ""."""
    devices = np.array(jax.devices())
    num_ranks = len(devices)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6, (num_ranks, _SLOTS))
    where = rng.integers(-1, num_ranks, (num_ranks, _SLOTS, _REPLICAS))
    plan, _ = compute_metadata(lengths, where)
    num_tokens = int(lengths.sum(1).max())
    capacity = int(np.asarray(plan.num_total_recv_tokens).max())
    x = rng.normal(size=(num_ranks, num_tokens, _FEATURES)).astype(np.float32)

    mesh = Mesh(devices, (_AXIS,))
    by_rank = NamedSharding(mesh, P(_AXIS))
    put = lambda a: jax.make_array_from_callback(a.shape, by_rank, lambda i: np.asarray(a)[i])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS))
    def there_and_back(x, plan):
        options: Any = {"axis_name": _AXIS, "implementation": name}
        received = dispatch(x[0], plan, capacity=capacity, **options)
        home = combine(received, plan, num_tokens=num_tokens, **options)
        return received[None], home[None]

    received, home = there_and_back(put(x), jax.tree.map(put, plan))
    blank = np.zeros((num_ranks, capacity, _FEATURES), np.float32)
    if not _equal(received, orchestrate_simulate(x, blank, plan)):
        return "dispatch returned the wrong rows"
    copies = np.zeros((num_ranks, num_tokens, 1), np.float32)
    for rank, sent in enumerate((where >= 0).sum(-1)):
        per_row = np.repeat(sent, lengths[rank])
        copies[rank, : len(per_row), 0] = per_row
    return "" if _equal(home, x * copies) else "combine returned the wrong sums"


def _equal(result: jax.Array, expected: Any) -> bool:
    """Compares the part of the result that this process holds."""
    whole = np.asarray(expected)
    return all(np.array_equal(s.data, whole[s.index]) for s in result.addressable_shards)
