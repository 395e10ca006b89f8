"""Tokens of global arrays that are sharded over more mesh axes than the ranks'.

A Shardy rule states which dimensions are sharded alike. It cannot state "as x, and also over the
ranks", because only the compiler knows over how many devices x is sharded. Small unused arrays
convey it: one for each possible number of devices of the other mesh axes, each sharded over the
ranks only after that number. All of them start alike, and the longest match applies.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch._jax_private import parse_flatten_op_sharding
from jax_cp_dispatch._ranks.communicator import other_axes
from jax_cp_dispatch._ranks.partitioned import partitioned
from jax_cp_dispatch._text import say_once
from jax_cp_dispatch.comm_gemm.layers.rank import Matmul


def keeps_token_axes(s: Matmul, x) -> bool:
    """Whether tokens of x may be sharded over other mesh axes too, and stay so."""
    is_even = min(s.row_counts) == max(s.row_counts) > 0
    return is_even and x.shape[-1] > 0 and bool(other_axes(s.mesh, s.comm.axis_names))


def dim_axes(sharding: Any, mesh: Any, num_dims: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes over which each dimension is sharded, major axis first.

    A sharding that mesh axes cannot describe (half of one, for example) counts as none.
    """
    try:
        (spec,) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(num_dims), mesh)
    except (ValueError, NotImplementedError, StopIteration):
        spec = ()
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return axes + [()] * (num_dims - len(axes))


def split_tokens(s: Matmul, x):
    """Returns an array [*batch, M] sharded as x, and then over the ranks."""
    *batch, rows, _ = x.shape
    p = s.comm.num_ranks
    sizes = [s.mesh.shape[name] for name in other_axes(s.mesh, s.comm.axis_names)]
    subsets = (c for k in range(len(sizes) + 1) for c in itertools.combinations(sizes, k))
    thin = (x[..., 0] != 0).astype(jnp.int8)
    ranks = _ranks_behind(s, x)[:, None]
    total = jnp.zeros_like(thin)
    for devices in sorted({math.prod(subset) for subset in subsets}):
        if rows % (devices * p) == 0:
            # If x is sharded over more devices, the third dimension already has an axis, which
            # Shardy keeps. If over fewer, the second dimension is not full.
            parts = thin.reshape(*batch, devices, p, rows // (devices * p))
            ranks_of = jnp.broadcast_to(ranks, parts.shape)
            total = total + (parts + ranks_of).reshape(thin.shape)
    return total


def _ranks_behind(s: Matmul, x):
    """Returns an array [p] sharded over the ranks; the compiler learns this after x."""
    dims = " ".join(f"d{i}" for i in range(x.ndim))
    ranks = jnp.zeros(s.comm.num_ranks, jnp.int8)
    of_ranks = NamedSharding(s.mesh, P(s.comm.axis_names))
    ranks = jax.lax.with_sharding_constraint(ranks, of_ranks)
    return _keep_first(ranks, x, f"r, {dims} -> r")


def split_like(array, like, num_dims: int):
    """Shards the first dimensions of an array like those of another one."""
    shared = [f"d{i}" for i in range(num_dims)]
    dims = " ".join([*shared, *(f"k{i}" for i in range(num_dims, array.ndim))])
    others = " ".join([*shared, *(f"n{i}" for i in range(num_dims, like.ndim))])

    @custom_vmap
    def run(array, like):
        return _keep_first(array, like, f"{dims}, {others} -> {dims}")

    @run.def_vmap
    def _(size, is_mapped, *arrays):
        array, like = (
            a if flag else jnp.broadcast_to(a, (size, *a.shape))
            for a, flag in zip(arrays, is_mapped, strict=True)
        )
        return split_like(array, like, num_dims + 1), True

    return run(array, like)


def _keep_first(array, other, rule: str):
    first = lambda array, other: [array]

    def partition(mesh, arguments, results):
        to = results[0].sharding
        return mesh, first, [to], (to, arguments[1].sharding)

    # On TPUs XLA shards as it sees fit.
    rules = {"sharding_rule": rule, "decode_shardings": False}
    return partitioned(first, partition, name=rule, on_tpus=first, **rules)(array, other)[0]


def tell_lost_axes(s: Matmul, axes: tuple[str, ...], why: str) -> None:
    """Warns once about the axes of tokens that XLA gathers."""
    ranks = s.comm.axis_names
    say_once(
        f"{s.op}: tokens are split over {axes} besides axis_name {ranks}, and XLA gathers them "
        f"over {axes}: {why}. Call inside jax.shard_map, reshape tokens to a dimension of {axes} "
        f"and one of {ranks}, or split them over {(*axes, *ranks)}, and constrain the result with "
        "jax.lax.with_sharding_constraint."
    )
