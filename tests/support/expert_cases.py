"""Experts that tokens chose, and the layer of the contract with another call or routing."""

import dataclasses
from typing import Any

import numpy as np
from on_mesh import AXIS
from operations import CASES, EXPERTS, ROOM

from jax_cp_dispatch import experts

W, T, K, E, D = 4, 6, 3, 8, 5
CAPACITY = 40
OPTIONS: dict[str, Any] = {"num_experts": E, "axis_name": AXIS, "capacity": CAPACITY}
(LAYER,) = (case for case in CASES if case.name == "experts")


def draw(seed=0, lowest=-1):
    """Returns x, weights and the index, each by ranks."""
    rng = np.random.default_rng(seed)
    x, weights = (rng.normal(size=(W, T, n)).astype(np.float32) for n in (D, K))
    return x, weights, rng.integers(lowest, E, (W, T, K)).astype(np.int32)


def layer_with(scaled=lambda rows, scale, routing: rows * scale, drops=False):
    """The layer with other experts, or with drops by the weights."""

    def call(arrays, **where):
        if drops:
            where |= {"overflow": "drop", "weights": arrays["weights"]}
        routing = experts.route(arrays["expert_index"], num_experts=EXPERTS, capacity=ROOM, **where)
        rows = experts.dispatch_tokens(arrays["x"], routing)
        y = scaled(rows, arrays["scale"], routing)
        return {"rows": rows, "out": experts.combine_tokens(y, arrays["weights"], routing)}

    return dataclasses.replace(LAYER, call=call)
