"""Attention lowered for TPUs: kernels, and rows that move by XLA's collectives; nothing runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import context_parallel_attention, local_attention, place_tokens
from jax_cp_dispatch._text import say_once

W, T = 4, 32
SHAPE = (1, W * T, 2, 8)


def lowered(**options):
    def loss(q, k, v):
        out = context_parallel_attention(q, k, v, mesh=mesh_of(W), axis_name=AXIS, **options)
        return (out.astype(jnp.float32) ** 2).sum()

    q = jnp.zeros(SHAPE, jnp.bfloat16)
    with pytest.warns(UserWarning, match="XLA's collectives .* platform is 'tpu'"):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, q, q)
        return program.lower(lowering_platforms=("tpu",)).as_text()


@pytest.fixture(autouse=True)
def warn_again():
    say_once.cache_clear()


@pytest.mark.parametrize("algorithm, num_moved", [("balanced", 6), ("placed", 4)])
def test_rows_move_by_xla(algorithm, num_moved):
    """Balanced: q, k, v there and out back, then their gradients. Placed: k and v, then theirs."""
    lengths = [60, 28, 40]
    if algorithm == "balanced":
        text = lowered(algorithm=algorithm, segment_ids=np.repeat([[1, 2, 3]], lengths, axis=1))
    else:
        placement = place_tokens([lengths], world_size=W, columns=W * T)
        text = lowered(algorithm=algorithm, documents=placement.documents)
    assert "custom_call @jax_cp_dispatch" not in text
    assert text.count("custom_call @ragged_all_to_all(") >= num_moved
    assert text.count("custom_call @tpu_custom_call(") == 3  # the output, dq, and dk with dv


@pytest.mark.parametrize(
    "dtype, automatic_axes, num_kernels",
    [("float32", 0, 3), ("float16", 0, 0), ("float32", 1, 0)],
)
def test_local_attention_has_kernels(dtype, automatic_axes, num_kernels):
    """Where they are known to compile: not for float16, nor where XLA partitions the program."""
    shardings = [NamedSharding(mesh_of(2), P()), None]
    q = jax.ShapeDtypeStruct((1, 64, 2, 8), dtype, sharding=shardings[not automatic_axes])
    loss = lambda q: local_attention(q, q, q)[0].sum()
    text = jax.jit(jax.grad(loss)).trace(q).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("custom_call @tpu_custom_call(") == num_kernels
