"""Whether `implementation="xla"` may use `ragged_all_to_all`: a test at first use decides.

Devices that are here run it. For devices that are not, such as those of a topology, it is compiled:
XLA refuses the operation for some TPU slices.
"""

import functools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array

from jax_cp_dispatch._dispatch.exchange_operands import MetadataOperands
from jax_cp_dispatch._dispatch.xla_collectives import combine_with_xla, dispatch_with_xla
from jax_cp_dispatch._dispatch.xla_transfers import XlaRanks
from jax_cp_dispatch._ranks.implementations import default_platform, program_platform
from jax_cp_dispatch._ranks.job import first_failure
from jax_cp_dispatch._text import say_once
from jax_cp_dispatch.metadata import compute_metadata

_PLATFORMS = {"cuda", "tpu"}  # XLA's CPU backend does not have the operation
_TIMEOUT = 60.0  # seconds for the other processes to reach the self-test
_AXIS, _ROWS, _CAPACITY = "ranks", 16, 10


def may_be_ragged(platforms: Sequence[str], backend: Any) -> bool:
    """Whether a program that is lowered for `platforms` may use `ragged_all_to_all`.

    A program for the devices that are here needs the self-test, which all processes of a job run
    together. A program for other devices, those of `backend`, needs a compiler that takes the
    operation. Any other program is only lowered, and uses it.

    Args:
      platforms: what the program is lowered for.
      backend: the client whose devices the program is for; None if it is unknown.
    """
    if len(platforms) != 1 or platforms[0] not in _PLATFORMS:
        return False
    if backend is not None and program_platform(backend.platform) == platforms[0]:
        devices = tuple(backend.devices())
        if devices[0] not in jax.devices():
            return _compiles(devices)
    return default_platform() != platforms[0] or _passes()


@functools.lru_cache(maxsize=16)
def _compiles(devices: tuple[Any, ...]) -> bool:
    """Whether the compiler of these devices, which cannot run here, takes the operation."""
    with ThreadPoolExecutor(1) as thread:
        refused = thread.submit(_refusal, devices).result()
    if refused:
        say_once(f"moves all ranks' rows by all-gather (implementation='xla'): {refused}.")
    return not refused


def _refusal(devices: tuple[Any, ...]) -> str:
    """Returns why the compiler refuses the operation, or "".

    The slice decides, not the number of ranks. Few ranks compile in less than a second; with 256,
    the compiler can take two minutes to refuse.
    """
    num_ranks = math.gcd(len(devices), 2)
    mesh = Mesh(np.array(devices).reshape(-1, num_ranks), ("groups", _AXIS))

    def exchange(x: Array) -> Array:
        each = jnp.arange(num_ranks, dtype=jnp.int32)
        one = jnp.ones_like(each)
        return jax.lax.ragged_all_to_all(x, x, each, one, each, one, axis_name=_AXIS)

    spec = P(mesh.axis_names)
    run = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec))
    rows = jax.ShapeDtypeStruct((len(devices) * num_ranks, 8), jnp.float32)
    platform = program_platform(devices[0].platform)
    try:
        run.trace(rows).lower(lowering_platforms=(platform,)).compile()
    except Exception as error:  # whatever XLA raises, the all-gather remains
        slice_, reason = f"{len(devices)} x {devices[0].device_kind}", str(error).splitlines()[0]
        return f"XLA cannot compile ragged_all_to_all for {slice_}: {reason}"
    return ""


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
