"""A byte-level transformer in Flax NNX: RMSNorm, RoPE, grouped-query attention and SwiGLU.

It knows nothing about devices. `ops` brings the operations whose implementation depends on the
sharding: `Sharded` in `sharding.py`, and `Unsharded` in `check.py` for comparison.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCABULARY = 256  # bytes
Batch = dict[str, Any]  # "tokens" and "labels", [B, T]; "documents", with positions; "checksums"


class Ops(Protocol):
    """The operations that depend on the sharding."""

    def prepare(self, batch: Batch) -> Batch:
        """Adds to the batch what all layers share; once per step."""
        ...

    def split_tokens(self, x: jax.Array) -> jax.Array:
        """[B, T, D]: gives each device its own tokens."""
        ...

    def gather_matmul(self, x: jax.Array, ws: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """[B, T, D] x [D, F] -> [B, T, F], split over F, for each weight; F may be (N, H)."""
        ...

    def matmul_scatter(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """[B, T, F] split over F, x [F, D] -> [B, T, D], where each device has its own tokens;
        F may be (N, H)."""
        ...

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> jax.Array:
        """Causal attention within documents: [B, T, N, H], [B, T, K, H] twice -> [B, T, N, H]."""
        ...

    def is_in_order(self, batch: Batch) -> jax.Array:
        """Whether tokens and labels are those of the documents; other ones are an error."""
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


def weight(rngs: nnx.Rngs, *shape: int, split: int):
    """A float32 weight, of which dimension `split`, 0 or 1, is split over "tensor".

    With 0, all dimensions but the last are contracted; with 1, the first.
    """
    contracted = math.prod(shape[: -1 if split == 0 else 1])
    values = jax.random.normal(rngs.params(), shape) / contracted**0.5
    names = ["tensor" if i == split else None for i in range(len(shape))]
    return nnx.Param(values, out_sharding=tuple(names))


class Block(nnx.Module):
    """Attention and an MLP, each with a norm before and a residual connection around it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, self.config = config, config
        norm = lambda: nnx.RMSNorm(c.width, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.q = weight(rngs, c.width, c.heads, c.head_size, split=1)
        self.k = weight(rngs, c.width, c.kv_heads, c.head_size, split=1)
        self.v = weight(rngs, c.width, c.kv_heads, c.head_size, split=1)
        self.out = weight(rngs, c.heads, c.head_size, c.width, split=0)
        self.gate = weight(rngs, c.width, c.hidden, split=1)
        self.up = weight(rngs, c.width, c.hidden, split=1)
        self.down = weight(rngs, c.hidden, c.width, split=0)

    def __call__(self, x: jax.Array, batch: Batch, ops: Ops) -> jax.Array:
        x = x + self.attention(self.cast(self.attention_norm(x)), batch, ops)
        ws = self.cast(self.gate[...]), self.cast(self.up[...])
        gate, up = ops.gather_matmul(self.cast(self.mlp_norm(x)), ws)
        return x + ops.matmul_scatter(jax.nn.silu(gate) * up, self.cast(self.down[...]))

    def attention(self, x: jax.Array, batch: Batch, ops: Ops) -> jax.Array:
        ws = tuple(self.cast(w[...]) for w in (self.q, self.k, self.v))
        q, k, v = ops.gather_matmul(x, ws)
        positions = batch["documents"].positions
        q, k = rope(q, positions), rope(k, positions)
        return ops.matmul_scatter(ops.attend(q, k, v, batch), self.cast(self.out[...]))

    def cast(self, array: jax.Array) -> jax.Array:
        return array.astype(self.config.dtype)


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
