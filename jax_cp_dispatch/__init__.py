"""Context parallelism for JAX: plan, move and attend packed documents over many devices."""

from pkgutil import extend_path as _extend_path

# A source tree on sys.path finds the extension that is installed elsewhere.
__path__ = _extend_path(__path__, __name__)

# First, so that versions that do not fit are named before anything else fails on them.
from jax_cp_dispatch import runtime as _runtime  # noqa: F401
from jax_cp_dispatch.attention import (
    balanced_attention,
    context_parallel_attention,
    local_attention,
    merge_partials,
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
    "AttnLayoutSeqlens",
    "DispatchBuffer",
    "Implementation",
    "Metadata",
    "PlanConfig",
    "available_implementations",
    "balanced_attention",
    "combine",
    "combine_qkv",
    "compute_attn_layout_seqlens",
    "compute_metadata",
    "compute_metadata_kv",
    "context_parallel_attention",
    "create_dispatch_buffer",
    "create_qkv_dispatch",
    "destroy_all_dispatch_buffers",
    "destroy_dispatch_buffer",
    "dispatch",
    "dispatch_qkv",
    "gen_seq_lens",
    "grow_dispatch_buffer",
    "list_dispatch_buffers",
    "local_attention",
    "merge_partials",
    "orchestrate_simulate",
    "plan_attention",
]
