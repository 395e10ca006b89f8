"""Masks of attention: which keys of its document a query sees.

`mask`: the interface, and the bases of masks of numbers, with closed forms of their ranges and
pairs, and of masks that data decides. `static` are the masks of numbers, `arrays` those of arrays,
`selected` has the keys that queries have picked.
`pairs` counts from the ranges of any mask; `csrc/planner/problem.h` counts the same pairs in the
planner. `read` reads the argument `mask=` of all functions.
"""

from jax_cp_dispatch.masks.arrays import (
    BlockDiffusion,
    Blocks,
    BothCopies,
    PrefixLM,
    Ranges,
    SharedPrefix,
    Tree,
    both_copies,
)
from jax_cp_dispatch.masks.mask import ArrayMask, Mask, MaskRanges, StaticMask
from jax_cp_dispatch.masks.selected import Selected
from jax_cp_dispatch.masks.static import BlockCausal, Causal, Chunked, Full, SlidingWindow

__all__ = [
    "ArrayMask",
    "BlockCausal",
    "BlockDiffusion",
    "Blocks",
    "BothCopies",
    "Causal",
    "Chunked",
    "Full",
    "Mask",
    "MaskRanges",
    "PrefixLM",
    "Ranges",
    "Selected",
    "SharedPrefix",
    "SlidingWindow",
    "StaticMask",
    "Tree",
    "both_copies",
]
