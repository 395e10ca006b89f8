"""Masks of attention: which keys of its document a query sees.

`mask`: the interface. One file for each mask: `static_mask` is the base of those of numbers, with
closed forms of their ranges and pairs, `array_mask` of those that data decides. `pairs` counts from
the ranges of any mask; `csrc/planner/pair_count.h` counts the same pairs in the planner. `read`
reads the argument `mask=` of all functions.
"""

from jax_cp_dispatch.masks.array_mask import ArrayMask
from jax_cp_dispatch.masks.block_causal import BlockCausal
from jax_cp_dispatch.masks.causal import Causal
from jax_cp_dispatch.masks.chunked import Chunked
from jax_cp_dispatch.masks.document_blocks import Blocks
from jax_cp_dispatch.masks.full import Full
from jax_cp_dispatch.masks.mask import Mask, MaskRanges
from jax_cp_dispatch.masks.prefix_lm import PrefixLM
from jax_cp_dispatch.masks.ranges import Ranges
from jax_cp_dispatch.masks.shared_prefix import SharedPrefix
from jax_cp_dispatch.masks.sliding_window import SlidingWindow
from jax_cp_dispatch.masks.static_mask import StaticMask
from jax_cp_dispatch.masks.tree import Tree

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
