"""Masks of attention: which keys of its document a query sees.

`mask`: the interface. One file for each mask: `static_mask` is the base of those of numbers, with
closed forms of their ranges and pairs, `array_mask` of those that data decides. `pairs` counts from
the ranges of any mask; `csrc/planner/pair_count.h` counts the same pairs in the planner. `read`
reads the argument `mask=` of all functions.
"""

from jax_cp_dispatch.masks.chunked import BlockCausal, Chunked
from jax_cp_dispatch.masks.mask import ArrayMask, Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.prefixes import PrefixLM, SharedPrefix
from jax_cp_dispatch.masks.ranges import Blocks, Ranges
from jax_cp_dispatch.masks.tree import Tree
from jax_cp_dispatch.masks.windows import Causal, Full, SlidingWindow

__all__ = [
    "ArrayMask",
    "BlockCausal",
    "Blocks",
    "Causal",
    "Chunked",
    "Full",
    "Mask",
    "MaskRanges",
    "PrefixLM",
    "Ranges",
    "SharedPrefix",
    "SlidingWindow",
    "StaticMask",
    "Tree",
]
