"""Attention to local keys, and over a mesh axis.

All algorithms use the two passes of `local` (one range of keys per query); `local/merge` is for
your own steps. In `planned`, rows move by a plan: queries and keys in `balanced`, only keys in
`placed`. In `rotating`, keys rotate through the ranks: `sequence` arranges rows, `attend` runs the
steps, `schedules`, `layout` and `key_chunks` define which rank holds what, and `communication`
moves it. Both folders have a `profile`, with its common parts in the folder `profile`;
`balance_profile` runs `rank_programs`, the part of each rank alone, on one device. `choose`, by the
plans of `planned_traffic`, and `api` use all of them. A call's `options` are made once and passed
on as a whole; `algorithms` hold the options of a single algorithm.
"""

from jax_cp_dispatch.attention.algorithms import (
    Auto,
    Balanced,
    Hamilton,
    Placed,
    Ring,
    Ulysses,
    Zigzag,
)
from jax_cp_dispatch.attention.api import context_parallel_attention
from jax_cp_dispatch.attention.balance_profile import BalanceProfile, balance_profile
from jax_cp_dispatch.attention.choose import Choice, choose_algorithm
from jax_cp_dispatch.attention.local.api import local_attention, local_attention_backward
from jax_cp_dispatch.attention.local.merge import merge_partials
from jax_cp_dispatch.attention.planned.balanced import balanced_attention
from jax_cp_dispatch.attention.planned.placed import placed_attention
from jax_cp_dispatch.attention.rotating.communication import chunk_exchange, ring_exchange
from jax_cp_dispatch.attention.rotating.hamilton import hamilton_attention
from jax_cp_dispatch.attention.rotating.profile import hamilton_attention_profile
from jax_cp_dispatch.attention.rotating.ring import ring_attention, zigzag_ring_attention
from jax_cp_dispatch.attention.rotating.step_record import (
    AttentionProfile,
    RankProfile,
    StepProfile,
)
from jax_cp_dispatch.attention.ulysses.ulysses import ulysses_attention
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.table import document_lengths

__all__ = [
    "AttentionProfile",
    "Auto",
    "BalanceProfile",
    "Balanced",
    "Choice",
    "Hamilton",
    "Placed",
    "RankProfile",
    "Ring",
    "StepProfile",
    "Ulysses",
    "Zigzag",
    "balance_profile",
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
    "ring_exchange",
    "ulysses_attention",
    "zigzag_permutation",
    "zigzag_ring_attention",
]
