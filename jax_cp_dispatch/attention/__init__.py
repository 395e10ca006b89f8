"""Attention to local keys, and over a mesh axis.

`context_parallel`: the door. It reads its arguments once, into a `Call`, `Operands` and documents
(`operands`), and asks an algorithm of `algorithms/`: whether it can serve the call, and for one
rank's part. `rotating`: the steps of algorithms whose keys rotate, in `key_chunks`. All algorithms
use the two passes of `local/` (one range of keys per query). `choose` predicts the fastest
algorithm, also in a call (`Auto`).
"""

from jax_cp_dispatch.attention.algorithms import (
    Algorithm,
    Balanced,
    Halo,
    Hamilton,
    Placed,
    Ring,
    Ulysses,
    Zigzag,
)
from jax_cp_dispatch.attention.choose import Auto, Choice, choose_algorithm
from jax_cp_dispatch.attention.context_parallel import context_parallel_attention
from jax_cp_dispatch.attention.key_chunks import chunk_exchange, ring_exchange
from jax_cp_dispatch.attention.local.local_attention import (
    local_attention,
    local_attention_backward,
    merge_partials,
)

__all__ = [
    "Algorithm",
    "Auto",
    "Balanced",
    "Choice",
    "Halo",
    "Hamilton",
    "Placed",
    "Ring",
    "Ulysses",
    "Zigzag",
    "choose_algorithm",
    "chunk_exchange",
    "context_parallel_attention",
    "local_attention",
    "local_attention_backward",
    "merge_partials",
    "ring_exchange",
]
