"""A byte-level transformer in Flax NNX: RMSNorm, RoPE, grouped-query attention and SwiGLU.

It knows nothing about devices. `ops` brings the operations whose implementation depends on the
sharding: `Sharded` in `sharding.py`, and `Unsharded` in `check.py` for comparison.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCABULARY = 256  # bytes
Batch = dict[str, Any]  # "tokens", "labels", "positions" and "segment_ids", each [B, T]


class Ops(Protocol):
    """The operations that depend on the sharding."""

    def prepare(self, batch: Batch) -> Batch:
        """Adds to the batch what all layers share; once per step."""
        ...

    def split_tokens(self, x: jax.Array) -> jax.Array:
        """[B, T, D]: gives each device its own tokens."""
        ...

    def gather_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """[B, T, D] x [D, F] -> [B, T, F], split over F."""
        ...

    def matmul_scatter(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """[B, T, F] split over F, x [F, D] -> [B, T, D], where each device has its own tokens."""
        ...

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> jax.Array:
        """Causal attention within documents: [B, T, N, H], [B, T, K, H] twice -> [B, T, N, H]."""
        ...

    def imbalance(self, batch: Batch) -> jax.Array:
        """Returns the largest work of attention on a device divided by the mean."""
        ...


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. Parameters, norms and the loss are float32; `dtype` is for the rest."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    hidden: int = 192
    dtype: str = "bfloat16"


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding. A token's angle depends on its position, not on where it is stored."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 1e4 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def weight(rngs: nnx.Rngs, rows: int, columns: int, split: tuple[str | None, str | None]):
    """A float32 matrix; `split` names the mesh axis of each dimension."""
    values = jax.random.normal(rngs.params(), (rows, columns)) / rows**0.5
    return nnx.Param(values, out_sharding=split)


class Block(nnx.Module):
    """Attention and an MLP, each with a norm before and a residual connection around it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, self.config = config, config
        self.group = c.heads // c.kv_heads  # query heads per KV head
        norm = lambda: nnx.RMSNorm(c.width, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        # One matrix for q, k and v, so their tokens are gathered once. Its columns are sorted by KV
        # head: the group's queries, key, value. Split over columns, a device has whole groups.
        qkv_columns = c.kv_heads * (self.group + 2) * c.head_size
        self.qkv = weight(rngs, c.width, qkv_columns, (None, "tensor"))
        self.out = weight(rngs, c.heads * c.head_size, c.width, ("tensor", None))
        # Likewise the two matrices of SwiGLU: gate and up alternate.
        self.gate_up = weight(rngs, c.width, 2 * c.hidden, (None, "tensor"))
        self.down = weight(rngs, c.hidden, c.width, ("tensor", None))

    def __call__(self, x: jax.Array, batch: Batch, ops: Ops) -> jax.Array:
        cast = lambda array: array.astype(self.config.dtype)
        x = x + self.attention(cast(self.attention_norm(x)), batch, ops)
        gate_up = ops.gather_matmul(cast(self.mlp_norm(x)), cast(self.gate_up[...]))
        gate, up = jnp.moveaxis(gate_up.reshape(*x.shape[:2], -1, 2), -1, 0)
        return x + ops.matmul_scatter(jax.nn.silu(gate) * up, cast(self.down[...]))

    def attention(self, x: jax.Array, batch: Batch, ops: Ops) -> jax.Array:
        c, rows = self.config, x.shape[:2]
        qkv = ops.gather_matmul(x, self.qkv[...].astype(c.dtype))
        qkv = qkv.reshape(*rows, c.kv_heads, self.group + 2, c.head_size)
        q = qkv[..., : self.group, :].reshape(*rows, c.heads, c.head_size)
        k, v = qkv[..., self.group, :], qkv[..., self.group + 1, :]
        q, k = rope(q, batch["positions"]), rope(k, batch["positions"])
        out = ops.attend(q, k, v, batch)
        return ops.matmul_scatter(out.reshape(*rows, -1), self.out[...].astype(c.dtype))


class Transformer(nnx.Module):
    """Embedding, blocks and head. The parameters of all blocks are stacked, for `lax.scan`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(VOCABULARY, config.width, rngs=rngs)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make_blocks(rngs):
            return Block(config, rngs=rngs)

        self.blocks = make_blocks(rngs)
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, batch: Batch, ops: Ops) -> jax.Array:
        """Returns float32 logits [B, T, 256]."""
        x = ops.split_tokens(self.embedding(batch["tokens"]).astype(self.config.dtype))
        graphdef, blocks = nnx.split(self.blocks)

        def block(x, parameters):
            return nnx.merge(graphdef, parameters)(x, batch, ops), None

        # The backward pass computes each block again, except what attention names "context": its
        # result.
        policy = jax.checkpoint_policies.save_only_these_names("context")
        x, _ = jax.lax.scan(jax.checkpoint(block, policy=policy), x, blocks)
        return self.head(self.norm(x.astype(jnp.float32)))


def loss(model: Transformer, batch: Batch, ops: Ops) -> jax.Array:
    """Returns the mean cross-entropy over the labels; a label of -1 does not count."""
    labels = batch["labels"]
    counts = labels >= 0
    scores = optax.softmax_cross_entropy_with_integer_labels(
        model(batch, ops), jnp.where(counts, labels, 0)
    )
    return jnp.sum(scores, where=counts) / jnp.maximum(counts.sum(), 1)
