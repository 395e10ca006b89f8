"""Every algorithm equals dense attention, forward and backward: one suite for all of them.

To keep programs few, each algorithm meets each option once; `sweep_attention.py` draws many more.
Meshes of several axes: test_mesh_axes.py; plans: test_planned_attention.py; local attention:
test_local_attention.py.
"""

from typing import Any

import numpy as np
import pytest
from calls import Call, check
from on_mesh import mesh_of

from jax_cp_dispatch import Balanced, Halo, Hamilton, PlanConfig, Ulysses, Zigzag
from jax_cp_dispatch.cycles import chunk_maps
from jax_cp_dispatch.masks import BlockCausal, Chunked, SlidingWindow

BLOCK = Balanced(PlanConfig(block=8))
MAPS = Hamilton(maps=chunk_maps(((0, 2, 4, 1, 3), (0, 1, 2, 3, 4))))
CYCLES = Hamilton(cycles=((0, 1, 2, 3, 4), (4, 3, 2, 1, 0)))
Fields = dict[str, Any]
ALL: Fields = {
    "sink": True, "returns": ("lse", "max_logits"), "logit_soft_cap": 3.0, "scale": 0.4,
}  # fmt: skip
ON_RANKS: Fields = {"check_vma": True}
UNCHECKED: Fields = {"check_vma": False}
BF16: Fields = {"dtype": "bfloat16", **UNCHECKED}
KNOWN: Fields = {"traced": False}

# If 2 * chunks does not divide the rows, blocks and chunks are uneven, some of them empty.
CASES = [
    Call("ring", 5, Chunked(4), "zigzag", heads=(3, 1), scale=0.2, **BF16),
    Call("ring", 2, SlidingWindow(2), rows=1, documents="positions", batch=2, heads=(4, 2),
         implementation="xla", **ON_RANKS),
    Call("ring", 3, "ranges", "zigzag", batch=2, heads=(4, 2), **ALL),
    Call("ring", 4, SlidingWindow(None, 3), rows=7, batch=2, heads=(4, 2), latents=True,
         **ON_RANKS),
    Call("zigzag", 8, "full", "zigzag", heads=(4, 2), logit_soft_cap=2.0, **BF16),
    Call("zigzag", 3, SlidingWindow(4, first=2), rows=8, documents="both", latents=True,
         **ON_RANKS),  # put into zigzag order
    Call("zigzag", 3, "shared_prefix", more=1, heads=(4, 2)),
    Call("zigzag", 1, Chunked(2), rows=9, sink=True, **ON_RANKS),
    Call("halo", 8, SlidingWindow(9), more=1, documents="none", batch=2, heads=(4, 2), **ALL),
    Call("halo", 5, Chunked(15), "zigzag", rows=7, documents="both", batch=2, latents=True,
         **ON_RANKS),
    Call("halo", 8, SlidingWindow(13, 2), "zigzag", rows=4, heads=(4, 1), sink=True, **BF16),
    Call("hamilton", 7, SlidingWindow(9, None), "zigzag", rows=4, documents="both", batch=2,
         logit_soft_cap=2.0, **BF16),
    Call(Hamilton(nodes=2), 8, BlockCausal(5), rows=13, documents="none", latents=True,
         implementation="xla"),
    Call(CYCLES, 5, "tree", more=1, batch=2, heads=(4, 2), **ALL),
    Call(MAPS, 5, Chunked(3), rows=4, documents="positions", dtype="float64", **ON_RANKS),
    Call("ulysses", 4, "tree", "zigzag", heads=(4, 4), logit_soft_cap=2.0, **BF16),
    Call("ulysses", 2, "prefix", rows=3, more=1, heads=(4, 1), implementation="xla", **ALL),
    Call("ulysses", 1, Chunked(3), rows=5, documents="none", **ON_RANKS),
    Call("ulysses", 8, SlidingWindow(9), documents="both", heads=(16, 2), batch=2, latents=True,
         sink=True, implementation="xla", **ON_RANKS),  # the only sum of latent rows by XLA
    Call(Ulysses(Zigzag()), 8, more=1, batch=2, heads=(4, 1), inner=2, latents=True,
         **ALL),  # of zigzag attention too
    Call(Ulysses(Hamilton()), 8, "full", "zigzag", rows=4, heads=(4, 2), inner=2,
         **BF16),  # direct: 4 ranks have no cycles
    Call(Ulysses(Halo()), 8, SlidingWindow(9), "zigzag", rows=4, documents="both", heads=(4, 2),
         sink=True, inner=4, implementation="xla", **ON_RANKS),
    Call(Ulysses(BLOCK), 4, "full", rows=12, heads=(4, 2), inner=2, returns=("lse",)),
    Call("balanced", 8, "tree", more=1, batch=2, heads=(4, 2), **ALL, **KNOWN),
    Call(BLOCK, 4, SlidingWindow(9, 14), rows=31, more=1, documents="both", batch=2, heads=(4, 2),
         latents=True),
    Call(BLOCK, 8, Chunked(7), rows=9, documents="positions", heads=(4, 4), dtype="bfloat16",
         **KNOWN),
    Call(BLOCK, 4, "blocks", rows=9, returns=("lse",), implementation="xla", **ON_RANKS),
    Call(BLOCK, 3, "shared_prefix", rows=8, heads=(4, 2)),
    Call("placed", 1, "full", "placed", rows=20),
    Call("placed", 2, SlidingWindow(8, 5), "placed", rows=31, batch=2),
    Call("placed", 3, "prefix", "placed", rows=12, batch=2, heads=(4, 2), **ALL),
    Call("placed", 5, Chunked(7), "placed", rows=31, heads=(4, 1), documents="both", **BF16),
    Call("placed", 3, SlidingWindow(6, first=4), "placed", rows=24, documents="both", **ON_RANKS),
    Call("placed", 4, "ranges_of_keys", "placed", rows=24, batch=2, latents=True,
         implementation="xla", **KNOWN),
    Call("auto", 3, SlidingWindow(3, 5), more=2, batch=2, heads=(4, 2), documents="both", **KNOWN),
]  # fmt: skip


@pytest.mark.parametrize("call", CASES, ids=str)
def test_equals_dense_attention(call):
    """On permuted devices; of masks of arrays two batches, which share a program if it can."""
    rng = np.random.default_rng(len(str(call)))
    mesh = mesh_of(call.num_ranks, rng.permutation(call.num_ranks))
    num_batches = 2 if isinstance(call.mask, str) and call.traced and call.order != "placed" else 1
    check(call, rng, mesh, num_batches=num_batches)
