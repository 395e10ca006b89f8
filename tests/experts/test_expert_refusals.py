"""Invalid calls of a layer of experts: each is rejected while it is traced."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from comm_gemm_refusals import W, trace
from on_mesh import AXIS, mesh_of
from refusals import check_rejected, each

from jax_cp_dispatch import experts

T, K, E = 4, 2, 8
X = np.ones((W, T, 3), np.float32)
INDEX = np.zeros((W, T, K), np.int32)
WEIGHTS = np.ones((W, T, K), np.float32)
HELD = np.arange(E, dtype=np.int32).reshape(W, -1)
ROWS = np.ones((W, 9, 3), np.float32)
OPTIONS: dict[str, Any] = {"num_experts": E, "axis_name": AXIS, "capacity": 9}


def route(index: Any = INDEX, **options: Any):
    return trace(lambda i: experts.route(i, **{**OPTIONS, **options}), index)


def known(index: Any):
    return trace(lambda x: x + experts.route(index, **OPTIONS).row[:1, :1], X)


def dispatch(x: Any = X, **options: Any):
    return trace(
        lambda x, i: experts.dispatch_tokens(x, experts.route(i, **OPTIONS), **options), x, INDEX
    )


def combine(y: Any = ROWS, weights: Any = WEIGHTS):
    return trace(
        lambda y, w, i: experts.combine_tokens(y, w, experts.route(i, **OPTIONS)), y, weights, INDEX
    )


def of_all_ranks(num: int = W * T, mesh: Any = None):
    return experts.route(np.zeros((num, K), np.int32), mesh=mesh, **OPTIONS)


def mixed():
    routing = of_all_ranks(mesh=mesh_of(W))
    return trace(lambda x: experts.dispatch_tokens(x, routing), X)


def fit(samples: Any, **options: Any):
    return experts.fit_capacity(samples, **{"num_experts": E, "world_size": W, **options})


WIDE = np.ones((W, T, 64), np.float32)
REFUSALS = {
    "route": [
        (lambda: route(INDEX[..., :0]), "needs at least one choice"),
        (lambda: route(INDEX[..., 0]), r"int32\[4\]; it needs integers \[T, k\]. Collapse"),
        (
            lambda: known(INDEX[0] + np.int64(2**32)),
            r"expert_index\[0, 0\] is 4294967296.* in \[-1, 7\]",
        ),
        (lambda: known(np.full((T, K), -2, np.int8)), "is -2; it needs to be in"),
        (lambda: route(physical_to_logical=HELD + 1), r"physical_to_logical\[3, 1\] is 8; it"),
        (lambda: route(physical_to_logical=HELD - 5), "is -5; it needs to be in"),
        (lambda: route(num_experts=6), "6, not a multiple of the 4 ranks"),
        (lambda: route(capacity=0), "at least 1"),
        (lambda: route(capacity=1.5), "needs to be an integer"),
        (lambda: route(capacity=2**30), "row numbers have 32 bits"),
        (lambda: route(overflow="wrap"), "needs to be 'error' or 'drop'"),
        (lambda: route(overflow="drop"), "without weights"),
        (lambda: route(weights=jnp.ones((T, K))), "and weights"),
        (
            lambda: route(overflow="drop", weights=jnp.ones((T, 3))),
            "k = 2 as in expert_index. Pass a weight",
        ),
        (lambda: route(physical_to_logical=HELD[:2]), r"shape \[2, 2\]; it needs \[4, L\]"),
        (lambda: route(deadline=-1), "positive number of seconds"),
        (lambda: route(implementation="nccl"), "nccl"),
        (lambda: of_all_ranks(), "no mesh with axis 'cp' was found"),
        (lambda: of_all_ranks(9, mesh_of(W)), "9 rows, not a multiple of the 4 ranks"),
    ],
    "dispatch_tokens": [
        (lambda: dispatch(X[:, :3]), "x has 3 rows but routing is of 4 tokens"),
        (lambda: trace(lambda x: experts.dispatch_tokens(x, x), X), "Pass the result of route"),
        (lambda: dispatch(scaling_mode="MXFP8_1D_SCALING"), "a multiple of 32"),
        (lambda: dispatch(scaling_mode="CURRENT_TENSOR_SCALING"), "those of whole tensors"),
        (lambda: dispatch(WIDE.astype(np.int32), scaling_mode="MXFP8_1D_SCALING"), "needs floats"),
        (mixed, "routing is of 4 of 4 ranks but the call is on 1 of 4"),
    ],
    "combine_tokens": [
        (lambda: combine(ROWS[:, :8]), "y has 8 rows but routing is of 9 rows"),
        (lambda: combine(weights=WEIGHTS[..., :1]), r"but routing is of choices \[4, 2\]"),
    ],
    "fit_capacity": [
        (lambda: fit([]), "there is no sample"),
        (lambda: fit([INDEX[0] + E]), "in .-1, 8"),
        (lambda: fit([INDEX[0]], num_experts=6), "not a multiple"),
        (lambda: fit([INDEX[0]], overflow=0.0), "between 0 and 1"),
    ],
}


@each(REFUSALS)
def test_refusals(name, call, says):
    check_rejected(name, call, says)
