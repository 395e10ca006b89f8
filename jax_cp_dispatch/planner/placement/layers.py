"""The masks that one placement serves, and how many layers use each."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.masks import StaticMask
from jax_cp_dispatch.masks.read import read_mask_of_numbers

_MOST = 2**15  # layers, after the common factor is removed: sums of pairs keep 64 bits


class Layers(NamedTuple):
    """Masks, and the layers that use each, without a common factor."""

    masks: tuple[StaticMask, ...]
    layers: tuple[int, ...]


def read_layers(
    op: str, mask: Any, masks: Sequence[Any] | None, layers: Sequence[int] | None
) -> Layers:
    """Reads `mask=`, `masks=` and `layers=`."""
    if masks is None:
        if layers is not None:
            raise ValueError(f"{op}: got layers without masks. Pass masks, one for each number.")
        return Layers((read_mask_of_numbers(op, mask),), (1,))
    if mask is not None:
        raise ValueError(f"{op}: got both mask and masks. Pass masks alone.")
    if not isinstance(masks, list | tuple) or not masks:
        raise ValueError(f"{op}: masks is {masks!r}; pass a tuple of at least one mask.")
    seen = tuple(read_mask_of_numbers(op, x) for x in masks)
    layers = (1,) * len(seen) if layers is None else layers
    if not isinstance(layers, list | tuple) or len(layers) != len(seen):
        raise ValueError(
            f"{op}: layers is {layers!r} for {len(seen)} masks. Pass one number for each mask."
        )
    for x in layers:
        check_integer(op, "layers", x)
    factor = math.gcd(*(int(x) for x in layers))
    least = [int(x) // max(factor, 1) for x in layers]
    if min(layers) < 1 or max(least) > _MOST:
        raise ValueError(f"{op}: layers is {layers!r}; pass numbers from 1 to {_MOST}.")
    return Layers(seen, tuple(least))
