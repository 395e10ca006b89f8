"""Single calls of MaxText's `AttentionOp` on a mesh with context 4 x tensor 2."""

from typing import Any

import flax.linen
import flax.nnx
import jax
import numpy as np
from maxtext.common.common_types import AttentionType  # pyright: ignore[reportMissingImports]
from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
from maxtext.layers.attention_op import AttentionOp  # pyright: ignore[reportMissingImports]
from maxtext.utils import maxtext_utils  # pyright: ignore[reportMissingImports]
from maxtext_runs import OPTIONS, packed_batch

B, T, N, K, H = 2, 64, 4, 2, 8
NUM_RANKS = 4
AXES = {"ici_context_parallelism": NUM_RANKS, "ici_tensor_parallelism": 2}


def operation(kind: str = "global", load_balance: bool = False, **options: Any) -> AttentionOp:
    options = {**OPTIONS, **AXES, "causal_block_size": 12, **options}
    options["context_parallel_load_balance"] = load_balance
    config = pyconfig.initialize(["", *(f"{name}={value}" for name, value in options.items())])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    return AttentionOp(
        config=config,
        mesh=mesh,
        attention_kernel="dot_product",
        max_target_length=T,
        num_query_heads=N,
        num_kv_heads=K,
        attention_type=AttentionType(kind),
        sliding_window_size=9,
        chunk_attn_window_size=24,
        attn_logits_soft_cap=2.0,
    )


def arrays():
    """Returns q, k, v, the cotangent of the output, segment ids and positions."""
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K, N))
    batch = packed_batch(rng, B, T, 64)
    ids, positions = batch["inputs_segmentation"], batch["inputs_position"]
    return q, k, v, g * (ids > 0)[..., None, None], ids, positions  # padding differs


def jitted(op, fn, *operands):
    """Returns `fn(op, *operands)` under MaxText's mesh and rules."""
    with jax.set_mesh(op.mesh), flax.linen.logical_axis_rules(op.config.logical_axis_rules):
        return flax.nnx.jit(fn)(op, *operands)


def attend(op, q, k, v, ids, positions, **more):
    return jitted(op, lambda op, *x: op(*x, "train", **more), q, k, v, ids, positions)
