"""The programs that are compiled of layers of experts, and of `ragged_all_to_all`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from shapes import TOKENS, Program, Shapes, on_ranks

import jax_cp_dispatch as cpd
from jax_cp_dispatch import experts

WIDTH, HIDDEN, CHOICES, OF_A_RANK = 1024, 512, 8, 8  # experts of a rank


def layer_of_experts(shapes: Shapes, implementation: str = "xla") -> Program:
    """Routing, tokens to their experts, two products, and sums back."""
    rows, num_experts = P("cp"), OF_A_RANK * shapes.num_ranks
    options: dict[str, Any] = {"num_experts": num_experts, "axis_name": "cp"}
    options |= {"capacity": CHOICES * TOKENS * 5 // 4, "implementation": implementation}

    def run(x, router, up, down):
        weights, index = jax.lax.top_k(jax.nn.softmax((x @ router).astype(jnp.float32)), CHOICES)
        routing = experts.route(index, overflow="drop", weights=weights, **options)
        received = experts.dispatch_tokens(x, routing)
        hidden = jax.nn.gelu(cpd.grouped_gemm(received, up, routing.group_sizes))
        y = cpd.grouped_gemm(hidden, down, routing.group_sizes)
        return experts.combine_tokens(y, weights, routing)

    arrays = (
        shapes.array((shapes.num_tokens, WIDTH), jnp.bfloat16, rows),
        shapes.array((WIDTH, num_experts), jnp.bfloat16, P()),
        shapes.array((num_experts, WIDTH, HIDDEN), jnp.bfloat16, rows),
        shapes.array((num_experts, HIDDEN, WIDTH), jnp.bfloat16, rows),
    )
    return Program(on_ranks(shapes, run, (rows, P(), rows, rows), rows), arrays, (0, 1, 2, 3))


def ragged_all_to_all(shapes: Shapes) -> Program:
    rows = P("cp")
    options: dict[str, Any] = {"axis_name": "cp", "implementation": "xla"}
    run = lambda *x: cpd.ragged_all_to_all(*x, **options)
    x = shapes.array((shapes.num_tokens, WIDTH), jnp.bfloat16, rows)
    sizes = shapes.array((shapes.num_ranks**2,), jnp.int32, rows)
    return Program(on_ranks(shapes, run, (rows,) * 6, rows), (x, x, *[sizes] * 4), (0, 1))
