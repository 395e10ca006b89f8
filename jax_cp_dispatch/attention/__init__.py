"""Attention to local keys, and over a mesh axis.

Everything rests on the two passes of `local` (one range of keys per query); `local/merge` is for
your own steps. In `planned`, rows move as a plan says: queries and keys in `balanced`, only keys in
`placed`. In `rotating`, keys go round the ranks: `sequence` brings rows into place, `attend` makes
the steps, `schedules`, `layout` and `chunks` say who holds what, `communication` moves it, and
`profile` times it. `choose` and `api` use all of them. A call's `options` are made once and passed
on whole; `algorithms` have those that one algorithm alone takes.
"""

from jax_cp_dispatch.attention.algorithms import (
    Auto,
    Balanced,
    Hamilton,
    Placed,
    Ring,
    Zigzag,
)
from jax_cp_dispatch.attention.api import context_parallel_attention
from jax_cp_dispatch.attention.choose import Choice, choose_algorithm, document_lengths
from jax_cp_dispatch.attention.local.api import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local.merge import merge_partials
from jax_cp_dispatch.attention.planned.balanced import balanced_attention
from jax_cp_dispatch.attention.planned.placed import placed_attention
from jax_cp_dispatch.attention.rotating.communication import chunk_exchange, ring_exchange
from jax_cp_dispatch.attention.rotating.hamilton import hamilton_attention
from jax_cp_dispatch.attention.rotating.layout import zigzag_permutation
from jax_cp_dispatch.attention.rotating.profile import (
    AttentionProfile,
    StepProfile,
    hamilton_attention_profile,
    ring_attention_profile,
    zigzag_ring_attention_profile,
)
from jax_cp_dispatch.attention.rotating.ring import ring_attention, zigzag_ring_attention

__all__ = [
    "AttentionProfile",
    "Auto",
    "Balanced",
    "Choice",
    "Hamilton",
    "Placed",
    "Ring",
    "StepProfile",
    "Zigzag",
    "balanced_attention",
    "choose_algorithm",
    "chunk_exchange",
    "context_parallel_attention",
    "document_lengths",
    "hamilton_attention",
    "hamilton_attention_profile",
    "local_attention",
    "local_attention_backward",
    "merge_partials",
    "placed_attention",
    "ring_attention",
    "ring_attention_profile",
    "ring_exchange",
    "zigzag_permutation",
    "zigzag_ring_attention",
    "zigzag_ring_attention_profile",
]
