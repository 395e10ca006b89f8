"""Context parallelism for JAX: plan, move and attend packed documents over many devices."""

from pkgutil import extend_path as _extend_path

# A source tree on sys.path finds the extension that is installed elsewhere.
__path__ = _extend_path(__path__, __name__)

# First, so that versions that do not fit are named before anything else fails on them.
from jax_cp_dispatch import runtime as _runtime  # noqa: F401
from jax_cp_dispatch.attention import (
    AttentionProfile,
    Choice,
    StepProfile,
    balanced_attention,
    choose_algorithm,
    chunk_exchange,
    context_parallel_attention,
    document_lengths,
    hamilton_attention,
    hamilton_attention_profile,
    local_attention,
    local_attention_backward,
    merge_partials,
    ring_attention,
    ring_attention_profile,
    ring_exchange,
    zigzag_permutation,
    zigzag_ring_attention,
    zigzag_ring_attention_profile,
)
from jax_cp_dispatch.cycles import (
    TwoLevelMaps,
    chunk_maps,
    cycle_sources,
    direct_sources,
    hamiltonian_cycles,
    hamiltonian_paths,
    source_is_earlier,
    two_level_cycles,
    two_level_maps,
)
from jax_cp_dispatch.dispatch import (
    DispatchBuffer,
    Implementation,
    available_implementations,
    combine,
    combine_qkv,
    create_dispatch_buffer,
    destroy_all_dispatch_buffers,
    destroy_dispatch_buffer,
    dispatch,
    dispatch_qkv,
    grow_dispatch_buffer,
    list_dispatch_buffers,
)
from jax_cp_dispatch.metadata import (
    AttnLayoutSeqlens,
    Metadata,
    compute_attn_layout_seqlens,
    compute_metadata,
    compute_metadata_kv,
)
from jax_cp_dispatch.planner import AttentionPlan, PlanConfig, plan_attention
from jax_cp_dispatch.scenarios import create_qkv_dispatch, gen_seq_lens, orchestrate_simulate

__version__ = "0.1.0"

__all__ = [
    "AttentionPlan",
    "AttentionProfile",
    "AttnLayoutSeqlens",
    "Choice",
    "DispatchBuffer",
    "Implementation",
    "Metadata",
    "PlanConfig",
    "StepProfile",
    "TwoLevelMaps",
    "available_implementations",
    "balanced_attention",
    "choose_algorithm",
    "chunk_exchange",
    "chunk_maps",
    "combine",
    "combine_qkv",
    "compute_attn_layout_seqlens",
    "compute_metadata",
    "compute_metadata_kv",
    "context_parallel_attention",
    "create_dispatch_buffer",
    "create_qkv_dispatch",
    "cycle_sources",
    "destroy_all_dispatch_buffers",
    "destroy_dispatch_buffer",
    "direct_sources",
    "dispatch",
    "dispatch_qkv",
    "document_lengths",
    "gen_seq_lens",
    "grow_dispatch_buffer",
    "hamilton_attention",
    "hamilton_attention_profile",
    "hamiltonian_cycles",
    "hamiltonian_paths",
    "list_dispatch_buffers",
    "local_attention",
    "local_attention_backward",
    "merge_partials",
    "orchestrate_simulate",
    "plan_attention",
    "ring_attention",
    "ring_attention_profile",
    "ring_exchange",
    "source_is_earlier",
    "two_level_cycles",
    "two_level_maps",
    "zigzag_permutation",
    "zigzag_ring_attention",
    "zigzag_ring_attention_profile",
]
