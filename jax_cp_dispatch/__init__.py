"""Context parallelism for JAX: plans, moves and computes attention of packed documents."""

from pkgutil import extend_path as _extend_path

# Lets a source tree on sys.path find the installed extension.
__path__ = _extend_path(__path__, __name__)

# First, so that incompatible versions are reported before anything else fails.
from jax_cp_dispatch._ranks import runtime as _runtime  # noqa: F401, I001
from jax_cp_dispatch import (
    adapters,
    buffers,
    cost,
    cycles,
    experts,
    gpu,
    masks,
    metadata,
    profiling,
    scaling,
    scenarios,
    selected,
    sequence,
)
from jax_cp_dispatch._dispatch.movement import (
    combine,
    combine_qkv,
    combine_start,
    dispatch,
    dispatch_qkv,
    dispatch_start,
    exchange_done,
    ragged_all_to_all,
)
from jax_cp_dispatch._ranks.implementations import Availability, available_implementations
from jax_cp_dispatch._ranks.processes import TransportChoice, initialize
from jax_cp_dispatch.attention import (
    Auto,
    Balanced,
    Halo,
    Hamilton,
    Placed,
    Ring,
    Ulysses,
    Zigzag,
    choose_algorithm,
    context_parallel_attention,
    local_attention,
    merge_partials,
)
from jax_cp_dispatch.comm_gemm import (
    all_gather_matmul,
    gemm,
    grouped_gemm,
    matmul_reduce_scatter,
)
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.metadata import Metadata, compute_metadata
from jax_cp_dispatch.planning import (
    Placement,
    Plan,
    PlanConfig,
    fit_plan_config,
    place_tokens,
    plan_attention,
    stack_plans,
)

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Availability",
    "Balanced",
    "Documents",
    "Halo",
    "Hamilton",
    "Metadata",
    "Placed",
    "Placement",
    "Plan",
    "PlanConfig",
    "Ring",
    "TransportChoice",
    "Ulysses",
    "Zigzag",
    "adapters",
    "all_gather_matmul",
    "available_implementations",
    "buffers",
    "choose_algorithm",
    "combine",
    "combine_qkv",
    "combine_start",
    "compute_metadata",
    "context_parallel_attention",
    "cost",
    "cycles",
    "dispatch",
    "dispatch_qkv",
    "dispatch_start",
    "exchange_done",
    "experts",
    "fit_plan_config",
    "gemm",
    "gpu",
    "grouped_gemm",
    "initialize",
    "local_attention",
    "masks",
    "matmul_reduce_scatter",
    "merge_partials",
    "metadata",
    "place_tokens",
    "plan_attention",
    "profiling",
    "ragged_all_to_all",
    "scaling",
    "scenarios",
    "selected",
    "sequence",
    "stack_plans",
]
