"""The masks that one placement serves, and how many layers use each."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.masks.read import read_mask
from jax_cp_dispatch.planner.query_table import query_table
from jax_cp_dispatch.planner.seen_keys import SeenKeys

_MOST = 2**15  # layers, after the common factor is removed: sums of pairs keep 64 bits


class Layers(NamedTuple):
    """Masks, and the layers that use each, without a common factor."""

    masks: tuple[Mask, ...]
    layers: tuple[int, ...]


def read_layers(
    op: str, mask: Any, masks: Sequence[Any] | None, layers: Sequence[int] | None
) -> Layers:
    """Reads `mask=`, `masks=` and `layers=`."""
    if masks is None:
        if layers is not None:
            raise ValueError(f"{op}: got layers without masks. Pass masks, one for each number.")
        return Layers((read_mask(op, mask),), (1,))
    if mask is not None:
        raise ValueError(f"{op}: got both mask and masks. Pass masks alone.")
    if not isinstance(masks, list | tuple) or not masks:
        raise ValueError(f"{op}: masks is {masks!r}; pass a tuple of at least one mask.")
    seen = tuple(read_mask(op, x) for x in masks)
    layers = (1,) * len(seen) if layers is None else layers
    if not isinstance(layers, list | tuple) or len(layers) != len(seen):
        raise ValueError(
            f"{op}: layers is {layers!r} for {len(seen)} masks. Pass one number for each mask."
        )
    for x in layers:
        check_integer(op, "layers", x)
    factor = math.gcd(*(int(x) for x in layers))
    reduced = [int(x) // max(factor, 1) for x in layers]
    if min(layers) < 1 or max(reduced) > _MOST:
        raise ValueError(f"{op}: layers is {layers!r}; pass numbers from 1 to {_MOST}.")
    return Layers(seen, tuple(reduced))


def describe_layers(
    problem: Any, seen: Sequence[SeenKeys], layers: Sequence[int], documents: DocumentTable
) -> None:
    """Sets several masks of a `PlacementProblem`, and how many layers use each."""
    if all(x.table is None for x in seen):
        masks = [x.mask for x in seen if isinstance(x.mask, StaticMask)]
        counts = (x.clipped(documents.num_tokens).pair_count for x in masks)
        problem.set_layers(list(zip(counts, layers, strict=True)))
        return
    tables = [query_table(x.mask, documents) if x.table is None else x.table for x in seen]
    pairs = sum(n * x.pairs_before for n, x in zip(layers, tables, strict=True))
    first, last = zip(*(x.running_keys(documents.lengths) for x in tables), strict=True)
    problem.set_table(pairs, np.min(first, axis=0), np.max(last, axis=0))
