"""All private names of JAX that this package uses: no public name does the same.

A new release of JAX can change them; then only this file and its callers need a look.
"""

from typing import Any

from jax._src import (
    custom_partitioning,
    distributed as distributed,  # the client of jax.distributed, and how it is shut down
    lib,
    xla_bridge as xla_bridge,  # whether the backends have started
)
from jax._src.core import (
    get_axis_env as get_axis_env,  # the axes of jax.vmap
    trace_state_clean as trace_state_clean,  # whether nothing is traced
)

# cuDNN's attention with its lse
from jax._src.cudnn import fused_attention_stablehlo as fused_attention_stablehlo
from jax._src.dispatch import (
    prim_requires_devices_during_lowering as prim_requires_devices_during_lowering,
)
from jax._src.mesh import get_concrete_mesh as get_concrete_mesh  # get_mesh fails during tracing
from jax._src.sharding_impls import parse_flatten_op_sharding as parse_flatten_op_sharding

# By address, the partitions of the programs that are being compiled, with their attributes
# `partition` and `mesh`; None if JAX has no such table.
sharding_callbacks: Any = getattr(custom_partitioning, "_sharding_callbacks", None)

# JAX records a scalar of this name when a compilation begins, and a duration when it ends.
COMPILATION_EVENT = "/jax/core/compile/backend_compile_duration"

_extension: Any = lib._jax  # pyright: ignore[reportPrivateImportUsage]
get_distributed_runtime_client = _extension.get_distributed_runtime_client
get_distributed_runtime_service = _extension.get_distributed_runtime_service
