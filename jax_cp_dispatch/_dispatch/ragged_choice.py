"""Whether `implementation="xla"` may use `ragged_all_to_all`: a self-test at first use decides."""

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array

from jax_cp_dispatch._dispatch.exchange_operands import MetadataOperands
from jax_cp_dispatch._dispatch.xla_collectives import combine_with_xla, dispatch_with_xla
from jax_cp_dispatch._dispatch.xla_plan import XlaRanks
from jax_cp_dispatch._ranks.implementations import default_platform
from jax_cp_dispatch._ranks.job import first_failure
from jax_cp_dispatch._warning import say_once
from jax_cp_dispatch.metadata import compute_metadata

_VARIABLE = "JAX_CP_DISPATCH_RAGGED"
_PLATFORMS = {"cuda", "tpu"}  # XLA's CPU backend does not have the operation
_TIMEOUT = 60.0  # seconds for the other processes to reach the self-test
_AXIS, _ROWS, _CAPACITY = "ranks", 16, 10


def may_be_ragged(platforms: Sequence[str]) -> bool:
    """Whether a program that is lowered for `platforms` may use `ragged_all_to_all`.

    A program for the devices that are here needs the self-test, which all processes of a job run
    together. A program for other devices is only lowered, and uses the operation.
    `JAX_CP_DISPATCH_RAGGED=0` always chooses the all-gather, 1 never tests.
    """
    if len(platforms) != 1 or platforms[0] not in _PLATFORMS:
        return False
    wanted = os.environ.get(_VARIABLE)
    if wanted in ("0", "1"):
        return wanted == "1"
    return default_platform() != platforms[0] or _passes()


@functools.cache
def _passes() -> bool:
    """Runs the self-test once, in a thread without the context of the program being lowered."""
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(_agreed_failure).result()
    if failed:
        say_once(f"moves all ranks' rows by all-gather (implementation='xla'): {failed}.")
    return not failed


def _agreed_failure() -> str:
    """Returns the first failure of all processes of the job, the same in all; or ""."""
    if jax.process_count() == 1:
        return _failure()
    return first_failure("ragged_all_to_all", _failure, _TIMEOUT)


def _failure() -> str:
    """Moves rows over all devices by both ways; returns what differs, or "" if nothing does."""
    try:
        return "" if _is_equal() else "ragged_all_to_all failed its self-test"
    except Exception as error:  # whatever XLA raises, the all-gather remains
        return f"ragged_all_to_all cannot run here: {str(error).splitlines()[0]}"


def _is_equal() -> bool:
    devices = np.array(jax.devices())
    ranks = np.arange(len(devices), dtype=np.int32)
    # Uneven ranges: each rank sends 0, 1 or 2 rows to the next rank, and others to the one after.
    num_rows = np.stack([ranks % 3, _ROWS // 2 - ranks % 3], axis=1)
    to = np.stack([ranks + 1, ranks + 2], axis=1) % len(devices)
    plan, _ = compute_metadata(num_rows, to)
    metadata = MetadataOperands(
        plan.num_recv_tokens, plan.seq_len, plan.dst_rank, plan.dst_offset, plan.src_offset
    )
    mesh = Mesh(devices, (_AXIS,))
    # The plan is a constant of the program, which runs in several processes as well.
    run = jax.shard_map(
        lambda: _num_different(metadata, len(devices)), mesh=mesh, in_specs=(), out_specs=P(_AXIS)
    )
    return not any(np.asarray(x.data).any() for x in jax.jit(run)().addressable_shards)


def _num_different(metadata: MetadataOperands, num_ranks: int) -> Array:
    """Returns [1]: how many elements of this rank's results differ between the two ways."""
    rank = jax.lax.axis_index(_AXIS)
    own = jnp.arange(_ROWS * 4, dtype=jnp.float32).reshape(_ROWS, 4) + 1000 * rank
    results = []
    for ragged in (True, False):
        ranks = XlaRanks(rank, (_AXIS,), num_ranks, ragged)
        rows = [own, own.astype(jnp.bfloat16)]
        sent = dispatch_with_xla(ranks, metadata, rows, capacity=_CAPACITY)
        dtypes = [x.dtype.name for x in sent]
        home = combine_with_xla(ranks, metadata, sent, num_tokens=_ROWS, dtypes=dtypes)
        results.append([*sent, *home])
    counts = [jnp.sum(x != y) for x, y in zip(*results, strict=True)]
    return jnp.sum(jnp.stack(counts))[None]
