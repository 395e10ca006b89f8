"""A training step of a small transformer on packed documents, by algorithm of attention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.planning import place_tokens, plan_attention
from jax_cp_dispatch.tools.programs import AXIS, DENSE, Ranks, drawn_lengths, make_segment_ids

ALGORITHMS = ("placed", "balanced", "zigzag")
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of the loss; sums in another order
VOCABULARY, RATE = 256, 1e-3
_ROWS = P(None, AXIS)


class Batch(NamedTuple):
    """One row of packed documents; arrays are [1, T]."""

    documents: Documents
    tokens: HostOrDevice
    labels: HostOrDevice
    counts: HostOrDevice


Attend = Callable[[jax.Array, jax.Array, jax.Array, Batch], jax.Array]


class Model(NamedTuple):
    """Sizes of the model: pre-norm layers of attention (RoPE) and a gated MLP of 3 x width."""

    layers: int
    heads: int
    head_size: int
    dtype: str

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        D, N, H, F = self.width, self.heads, self.head_size, 3 * self.width
        return {"qkv": (D, 3 * N * H), "out": (N * H, D), "gate_up": (D, 2 * F), "down": (F, D)}

    def parameters(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        draw = lambda *shape: (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)
        layers = {name: draw(self.layers, *shape) for name, shape in self.matrices.items()}
        return {"embedding": draw(VOCABULARY, self.width), "layers": layers}


def _norm(x):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _rotate(x, positions):
    frequency = 1e4 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angle = positions[..., None, None] * frequency
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def _loss(model: Model, parameters, batch: Batch, attend: Attend):
    cast = lambda x: x.astype(model.dtype)

    def layer(x, w):
        q, k, v = jnp.split(cast(_norm(x)) @ cast(w["qkv"]), 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], model.heads, -1) for y in (q, k, v))
        q, k = (_rotate(y, batch.documents.positions) for y in (q, k))
        x = x + attend(q, k, v, batch).reshape(*x.shape[:2], -1) @ cast(w["out"])
        gate, up = jnp.split(cast(_norm(x)) @ cast(w["gate_up"]), 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ cast(w["down"]), None

    policy = jax.checkpoint_policies.save_only_these_names("context")
    x = cast(parameters["embedding"][batch.tokens])
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, parameters["layers"])
    scores = jax.nn.log_softmax(_norm(x) @ parameters["embedding"].T)
    chosen = jnp.take_along_axis(scores, batch.labels[..., None], -1)[..., 0]
    return -(chosen * batch.counts).sum() / batch.counts.sum()


def drawn_documents(tokens: int) -> list[int]:
    return drawn_lengths(tokens, seed=1, median=tokens / 16)


def compiled_steps(
    ranks: Ranks, lengths: list[int], model: Model, others: Mapping[str, Attend] | None = None
) -> dict[str, "Step"]:
    """Compiles a step of each algorithm, of dense attention, and of `others` by name.

    Raises:
      ValueError: the losses of their first steps differ.
    """
    dense: dict[str, Attend] = {DENSE: _dense, **(others or {})}
    steps = {name: Step(ranks, model, lengths, name) for name in ALGORITHMS}
    steps |= {name: Step(ranks, model, lengths, attend) for name, attend in dense.items()}
    expected = steps[DENSE].first_loss
    for name, step in steps.items():
        if not abs(step.first_loss - expected) <= TOLERANCE[model.dtype] * expected:
            raise ValueError(
                f"bench: the loss with {name} is {step.first_loss}, with dense attention "
                f"{expected}. Report this with the output."
            )
    return steps


class Step:
    """The compiled step of one algorithm with its parameters and batch; a call makes a step.

    `algorithm` is one of this package, or a function of q, k, v and the batch.
    """

    def __init__(self, ranks: Ranks, model: Model, lengths: list[int], algorithm: str | Attend):
        batch = _batch(lengths)
        if algorithm == "placed":
            placement = place_tokens(lengths, world_size=ranks.count)
            arrays = placement.apply(batch[1:])
            batch = Batch(placement.documents, *arrays)
        elif algorithm == "balanced":
            plan = plan_attention(lengths=lengths, world_size=ranks.count)
            batch = batch._replace(documents=batch.documents.with_plan(plan))
        arrays = (ranks.put(x, _ROWS) for x in batch[1:])
        self._batch = Batch(ranks.put_documents(batch.documents), *arrays)
        self._parameters = jax.tree.map(lambda x: ranks.put(x, P()), model.parameters())
        attend = algorithm if callable(algorithm) else partial(_ours, ranks, algorithm)

        @partial(jax.jit, donate_argnums=0)
        def step(parameters, batch):
            value, gradients = jax.value_and_grad(partial(_loss, model))(parameters, batch, attend)
            update = jax.tree.map(lambda w, g: w - RATE * g, parameters, gradients)
            return update, value

        self.program = step.lower(self._parameters, self._batch).compile()
        memory = self.program.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory else float("nan")
        self.first_loss = float(self())

    def __call__(self) -> jax.Array:
        self._parameters, value = self.program(self._parameters, self._batch)
        return value


def _batch(lengths: list[int]) -> Batch:
    ids = make_segment_ids(lengths)
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, ids.shape).astype(np.int32)
    is_last = np.roll(ids, -1, axis=1) != ids
    is_last[0, -1] = True
    return Batch(
        documents=Documents(ids),
        tokens=tokens,
        labels=np.roll(tokens, -1, axis=1),
        counts=(~is_last).astype(np.float32),
    )


def _ours(ranks: Ranks, algorithm: str, q, k, v, batch: Batch):
    return context_parallel_attention(
        *(q, k, v),
        mesh=ranks.mesh,
        axis_name=AXIS,
        algorithm=algorithm,
        documents=batch.documents,
    )


def _dense(q, k, v, batch: Batch):
    ids = batch.documents.segment_ids[0]
    same = (ids[:, None] == ids)[None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)
