"""Numbers of tokens that the ranks do not divide: padding is added, and removed from results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

from jax_cp_dispatch._ranks.call_context import retype


def pad_tokens(tree: Any, missing: int) -> Any:
    """Appends zeros to arrays [B, T, ...]: tokens of segment 0."""

    def pad(x):
        append = np.pad if isinstance(x, np.ndarray) else jnp.pad  # known values stay known in jit
        return append(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, tree) if missing else tree


def cut_tokens(tree: Any, num_tokens: int, mesh: Any) -> Any:
    """Removes what `pad_tokens` has appended.

    Explicit mesh axes shard equal parts only, so none of them shards the remaining tokens.
    """

    def cut(x):
        if AxisType.Explicit in mesh.axis_types:
            batch, _, *others = jax.typeof(x).sharding.spec
            x = retype(x, mesh, P(batch, None, *others))
        return x[:, :num_tokens]

    return jax.tree.map(cut, tree)
