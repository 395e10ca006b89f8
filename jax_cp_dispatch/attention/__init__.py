"""Attention to local keys, and over a mesh axis.

`context_parallel`: the door. It reads its arguments once, into `call_options`, `operands` and
documents, and asks an algorithm of `algorithms/`: whether it can serve the call, and for one rank's
part.
`rotating/`: the steps of algorithms whose keys rotate. All algorithms use the two passes of
`local/` (one range of keys per query); `local/merge` is for your own steps. `latents` are rows from
which each rank expands keys, `expanded_heads` those of sharded heads. `choose` predicts the
fastest algorithm; `auto` does so in a call.
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
