"""Operands, states and checks of overlapped 8-bit GEMMs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scaled_matmul_oracle as oracle
from comm_gemm_cases import methods, normal
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, on_ranks
from scaled_gemm_cases import E4M3, E5M2, MODES, near
from scaling_oracle import next_state

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.scaling import DelayedScaling, MatmulScaling

DELAYED, CURRENT, _ = MODES
GATHER, SCATTER = all_gather_matmul, matmul_reduce_scatter
ORACLES = {GATHER: oracle.all_gather_matmul, SCATTER: oracle.matmul_reduce_scatter}
K, N = 64, 32
SCALES = {"x": np.float32(77.5), "w": np.float32(1.5), "dy": np.float32(3000)}


def of(op, num_ranks, batch, tokens) -> list[Any]:
    """Draws x, w, dy and bias per rank, with different magnitudes on each rank."""
    p, gathers = num_ranks, op is GATHER
    each = np.float32(2) ** (np.arange(p) % 3)
    sized = lambda seed, *shape: np.einsum("r...,r->r...", normal(seed, p, *shape), each)
    rows_in, rows_out = (tokens, p * tokens) if gathers else (p * tokens, tokens)
    x, dy = sized(0, *batch, rows_in, K), sized(2, *batch, rows_out, N)
    bias = sized(3, N) if gathers else np.stack([normal(3, N)] * p)
    return [x, sized(1, K, N), dy, bias]


def state_of(scales=SCALES):
    """Returns states: the history of x has 0.5, 100 and inf, that of w 1e-3, that of dy nothing."""
    zeros = np.zeros(1024, np.float32)
    histories = {"x": zeros.copy(), "w": zeros.copy(), "dy": zeros.copy()}
    histories["x"][:3], histories["w"][0] = (0.5, 100, np.inf), 1e-3
    each = {
        name: DelayedScaling(amax_history=jnp.asarray(histories[name]), scale=jnp.asarray([scale]))
        for name, scale in scales.items()
    }
    return MatmulScaling(**each), histories


def value_and_gradients(fn, x, w, bias, dy, state=None) -> Any:
    """(y, dx, dw, dbias, next state or None)"""
    call = lambda x, w, bias, state: fn(x, w, bias=bias, scaling_state=state)
    y, pull = jax.vjp(call, x, w, bias, state)
    return (y, *pull(dy))


def expected(op, arrays, mode, counts=None):
    """(y, dx, dw, dbias) for arrays of `of`, with the state of `state_of` if scaling is delayed."""
    x, w, dy, bias = arrays
    scales = SCALES if mode == DELAYED else None
    return ORACLES[op](x, w, dy, mode, counts, scales, bias)


def given_state(mode):
    return state_of()[0] if mode == DELAYED else None


def check(got, want, name):
    for part, one, expected in zip(("y", "dx", "dw", "dbias"), got, want, strict=False):
        near(one, expected, f"{name}, {part}")


def check_state(state, arrays):
    """Checks the state after a step with x, w and dy of all ranks."""
    _, histories = state_of()
    for name, x in arrays.items():
        kind, entry = E5M2 if name == "dy" else E4M3, getattr(state, name)
        history, scale = next_state(histories[name], SCALES[name], x, kind)
        shape = np.shape(entry.amax_history)
        np.testing.assert_array_equal(entry.amax_history, np.broadcast_to(history, shape))
        np.testing.assert_array_equal(entry.scale, np.full(np.shape(entry.scale), scale))


def run_all(op, mesh, mode, x, w, bias, dy, *, names, counts):
    """Returns the results of the methods of these names, in one program."""
    each, state = methods(op, mesh.size), given_state(mode)

    def local(x, w, bias, dy):
        options = {"axis_name": AXIS, "scaling_mode": mode, "row_counts": counts}
        return {
            name: value_and_gradients(partial(each[name], **options), x, w, bias, dy, state)
            for name in names
        }

    return on_ranks(local, mesh)(x, w, bias, dy)
