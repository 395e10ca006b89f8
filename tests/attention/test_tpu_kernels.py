"""Attention on TPUs, without a TPU: kernels in Pallas's interpreter, and lowered programs.

The interpreter has a TPU's memories and copies: it finds races, reads out of bounds, and fills
memory with NaN before it is written.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import Call, check
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import context_parallel_attention, local_attention, place_tokens
from jax_cp_dispatch._text import say_once  # inner: a warning comes once
from jax_cp_dispatch.attention.local import tpu  # inner: kernels that cannot run here
from jax_cp_dispatch.attention.rotating import attend as rotating  # inner: for these


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets kernels, and fails if two accesses race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place of `races`

    monkeypatch.setattr(rotating, "attend_blocks", tpu.attend)
    monkeypatch.setattr(rotating, "block_gradients", tpu.gradients)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


# Rings, in which keys come in parts; `sweep.py attention --tpu` draws others.
CALLS = [
    Call("ring", 2, "tree", rows=70, heads=(2, 1), features=(128, 128)),
    Call("ring", 1, rows=300, documents="none", heads=(2, 1), features=(192, 128),
         dtype="bfloat16", scale=-0.1, logit_soft_cap=0.7, sink=True,
         returns=("lse", "max_logits")),
]  # fmt: skip


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_kernels(call):
    """Keys and queries of padding are NaN."""
    check(call, np.random.default_rng())


# ---- Lowered for TPUs: kernels, and rows that move by XLA's collectives; nothing runs.

W, ROWS = 4, 32


def lowered(**options):
    def loss(q, k, v):
        out = context_parallel_attention(q, k, v, mesh=mesh_of(W), axis_name=AXIS, **options)
        return (out.astype(jnp.float32) ** 2).sum()

    q = jnp.zeros((1, W * ROWS, 2, 8), jnp.bfloat16)
    with pytest.warns(UserWarning, match="XLA's collectives .* platform is 'tpu'"):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, q, q)
        return program.lower(lowering_platforms=("tpu",)).as_text()


@pytest.fixture
def warn_again():
    say_once.cache_clear()


@pytest.mark.usefixtures("warn_again")
@pytest.mark.parametrize("algorithm, num_moved", [("balanced", 6), ("placed", 4)])
def test_rows_move_by_xla(algorithm, num_moved):
    """Balanced: q, k, v there and out back, then their gradients. Placed: k and v, then theirs."""
    lengths = [60, 28, 40]
    if algorithm == "balanced":
        text = lowered(algorithm=algorithm, segment_ids=np.repeat([[1, 2, 3]], lengths, axis=1))
    else:
        placement = place_tokens([lengths], world_size=W, columns=W * ROWS)
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
