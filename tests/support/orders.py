"""Packed batches in each order of tokens over the ranks: contiguous, zigzag and placed."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import place_tokens, zigzag_permutation

ORDERS = ("contiguous", "zigzag", "placed")


class Order:
    """A batch of segment ids in one order; `apply` and `restore` reorder arrays [B, T, ...]."""

    def __init__(self, name, segment_ids, num_ranks, *, mesh=None):
        self.name, self.num_ranks = name, num_ranks
        self.mesh = mesh or mesh_of(num_ranks)
        self.placement = None
        self.given: dict[str, Any] = {"axis_name": AXIS}
        if name == "placed":
            self.placement = place_tokens(segment_ids=segment_ids, world_size=num_ranks)
            self.given["plan"] = self.placement.plan
        else:
            self.given |= {"segment_ids": self.apply(segment_ids), "layout": name}

    def apply(self, x):
        if self.name == "contiguous":
            return x
        if self.placement is not None:
            return self.placement.apply(x)
        order = zigzag_permutation(jax.tree.leaves(x)[0].shape[1], self.num_ranks)
        return jax.tree.map(lambda x: x[:, order], x)

    def restore(self, x):
        if self.name == "contiguous":
            return x
        if self.placement is not None:
            return self.placement.restore(x)
        size = jax.tree.leaves(x)[0].shape[1]
        order = zigzag_permutation(size, self.num_ranks, inverse=True)
        return jax.tree.map(lambda x: x[:, order], x)

    def on_ranks(self, layer):
        """Returns `layer(tokens, weights, **given)` inside `shard_map`, of tokens in order."""
        given = dict(self.given)
        arrays = {name: given.pop(name) for name in ("segment_ids", "plan") if name in given}

        def local(tokens, weights, arrays):
            return layer(tokens, weights, **arrays, **given)

        specs = {name: P(AXIS) if name == "plan" else P(None, AXIS) for name in arrays}
        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P(None, AXIS), P(), specs),
            out_specs=P(None, AXIS),
        )
        return lambda tokens, weights: self.restore(mapped(self.apply(tokens), weights, arrays))

    def on_global_arrays(self, layer):
        """The same, on global arrays."""
        given = self.given | {"mesh": self.mesh}
        return lambda tokens, weights: self.restore(layer(self.apply(tokens), weights, **given))


def packed(rows):
    """Returns segment ids [B, T] of rows of document lengths; a negative length is padding."""
    ids = []
    for row in rows:
        numbers = np.cumsum(np.array(row) > 0)
        parts = [np.full(abs(n), i if n > 0 else 0) for n, i in zip(row, numbers, strict=True)]
        ids.append(np.concatenate(parts))
    return np.array(ids, np.int32)


# One giant document; documents cut 0, 1 and 7 times, of length 1, and padding; two batch rows.
BATCHES = {
    "giant": packed([[96]]),
    "mixed": packed([[1, 70, -3, 9, 1, 2, -10], [13, 1, 1, 30, 51]]),
    "whole": packed([[12] * 8]),
}
