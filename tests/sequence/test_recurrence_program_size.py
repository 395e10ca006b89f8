"""The size of the programs of layers: a model traces, lowers and compiles every call."""

import jax
import jax.numpy as jnp
import pytest
from orders import BATCHES, Order

from jax_cp_dispatch import sequence

# Lines of one call with its gradient. When maps had derivatives: 4,561, 4,847 and 3,104.
MOST = {
    ("gated_delta_rule", False): 2500,
    ("gated_delta_rule", True): 2600,
    ("linear_attention", False): 2300,
}


@pytest.mark.parametrize(("op", "per_channel"), MOST)
def test_lines_of_a_call_with_its_gradient(op, per_channel):
    batch, num_tokens = BATCHES["mixed"].shape
    heads, size = (batch, num_tokens, 2), (8,)
    shapes = [heads + size, heads + size, heads + size, heads + size * per_channel, heads]
    shapes = shapes[: 5 if op == "gated_delta_rule" else 4]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    run = Order("packed", BATCHES["mixed"], 8).on_ranks(
        lambda tokens, _, **given: getattr(sequence, op)(*tokens, **given)
    )

    def both(tokens):
        out, pull = jax.vjp(lambda tokens: run(tokens, ()), tokens)
        return out, pull(out)

    lines = jax.jit(both).lower(arrays).as_text().count("\n")
    assert lines < MOST[op, per_channel], lines
