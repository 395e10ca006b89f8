"""Reads the argument `mask=`, once, where a function is called."""

import collections
from typing import Any

import jax
import numpy as np

from jax_cp_dispatch._arguments import is_on_host
from jax_cp_dispatch.masks.mask import Mask, MaskKind, Order, StaticMask
from jax_cp_dispatch.masks.static import Causal, Full

_BY_NAME: dict[str, type[Mask]] = {"full": Full, "causal": Causal}


def read_mask(op: str, mask: Any) -> Mask:
    """Returns a mask, simplified; a name is that of a mask without numbers, None is causal."""
    if mask is None:
        return Causal()
    if isinstance(mask, str) and mask in _BY_NAME:
        return _BY_NAME[mask]()
    if isinstance(mask, Mask):
        return mask.simplified()
    shape = getattr(mask, "shape", None)
    if shape is not None:
        raise TypeError(
            f"{op}: mask is an array of shape {list(shape)}; it needs to be an object of "
            "jax_cp_dispatch.masks, with one range of keys for each query and one of queries for "
            "each key. Pass masks.Ranges, PrefixLM, Blocks, SharedPrefix or Tree, of arrays "
            "[B, T]; for several ranges of keys call local_attention for each, and merge_partials."
        )
    if isinstance(mask, list | tuple):
        kinds = collections.Counter(type(x).__name__ for x in mask).most_common()
        raise TypeError(
            f"{op}: mask is a {type(mask).__name__} of {len(mask)} "
            f"({', '.join(f'{n} {kind}' for kind, n in kinds)}); it needs to be one mask. Pass "
            "one; place_tokens takes masks= for layers that differ, and fit_plan_config "
            "takes mask= with one for each batch."
        )
    error = ValueError if isinstance(mask, str) else TypeError
    raise error(
        f"{op}: mask is {mask!r}; it needs to be 'causal', 'full', or an object of "
        "jax_cp_dispatch.masks. Pass, for example, masks.SlidingWindow(1024)."
    )


def read_mask_of_numbers(op: str, mask: Any) -> StaticMask:
    """Returns a mask without arrays, whose pairs follow from the lengths of documents."""
    mask = read_mask(op, mask)
    if not isinstance(mask, StaticMask):
        raise ValueError(
            f"{op}: mask is {mask}, but this needs one of numbers that sees one range of keys, "
            "such as causal, SlidingWindow or Chunked. Pass one of these. Plans count the pairs of "
            "other masks."
        )
    return mask


def read_mask_on_host(op: str, mask: Any, shape: tuple[int, ...]) -> Mask:
    """Returns a mask whose arrays, if any, are NumPy's, of a batch of `shape`, `[B, T]`."""
    mask = read_mask(op, mask)
    check_mask_arrays(op, mask, shape)
    if not all(is_on_host(x) for x in jax.tree.leaves(mask)):
        raise ValueError(
            f"{op}: the arrays of {mask} are traced or spread over processes. Pass whole arrays, "
            "as NumPy, on every process, or plan inside jit, from segment ids."
        )
    return jax.tree.map(np.asarray, mask)


def check_mask_order(op: str, mask: Any, order: Order) -> None:
    """Requires that the arrays of a mask, if any, are in the order of the tokens."""
    found = getattr(mask, "order", order)
    if found != order:
        raise ValueError(
            f"{op}: the arrays of mask={mask} are in {found}, but the tokens in {order}. Make the "
            "mask of whole batch rows in packed order, and pass it through Documents.apply or "
            "Placement.apply of these tokens."
        )


def check_mask_arrays(op: str, mask: Mask | MaskKind, shape: tuple[int, ...]) -> None:
    """Requires that the arrays of a mask, if any, have one number for each token, `[B, T]`."""
    for x in jax.tree.leaves(mask):
        if x.shape != shape:
            raise ValueError(
                f"{op}: {mask} needs one number for each token, but the batch has shape "
                f"{list(shape)}. Pass arrays of that shape."
            )
