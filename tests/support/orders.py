"""Packed batches in each order of tokens over the ranks: packed, zigzag and placed."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Documents, place_tokens


class Order:
    """A batch of segment ids in one order; `apply` and `restore` reorder arrays [B, T, ...]."""

    def __init__(self, name, segment_ids, num_ranks, *, mesh=None):
        self.mesh = mesh or mesh_of(num_ranks)
        self.placement = None
        self.documents = of = Documents(segment_ids)
        if name == "zigzag":
            self.documents = of = of.zigzag(num_ranks)
        if name == "placed":
            self.placement = of = place_tokens(segment_ids=segment_ids, world_size=num_ranks)
            self.documents = self.placement.documents
        self.apply, self.restore = of.apply, of.restore
        self.given: dict[str, Any] = {"axis_name": AXIS, "documents": self.documents}

    def on_ranks(self, layer):
        """Returns `layer(tokens, weights, **given)` inside `shard_map`, of tokens in order."""

        def local(tokens, weights, documents):
            return layer(tokens, weights, axis_name=AXIS, documents=documents)

        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P(None, AXIS), P(), self.documents.specs(AXIS)),
            out_specs=P(None, AXIS),
        )

        def run(tokens, weights):
            return self.restore(mapped(self.apply(tokens), weights, self.documents))

        return run

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
