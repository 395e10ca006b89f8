"""Masks of attention: which keys of its document a query sees.

`mask`: the interface. One file for each mask, with its ranges for the device and its pairs on the
host; `csrc/planner/pair_count.h` counts the same pairs in the planner. `read` reads the argument
`mask=` of all functions.
"""

from jax_cp_dispatch.masks.causal import Causal
from jax_cp_dispatch.masks.chunked import Chunked
from jax_cp_dispatch.masks.full import Full
from jax_cp_dispatch.masks.mask import Mask
from jax_cp_dispatch.masks.sliding_window import SlidingWindow

__all__ = ["Causal", "Chunked", "Full", "Mask", "SlidingWindow"]
