"""Every kind of attention in single calls of MaxText's `AttentionOp`."""

from unittest import mock

import jax
import numpy as np
import pytest
from maxtext.layers.attention_op import AttentionOp  # pyright: ignore[reportMissingImports]
from maxtext_calls import NUM_RANKS, T, arrays, attend, jitted, operation

import jax_cp_dispatch as cpd
from jax_cp_dispatch.adapters import maxtext, maxtext_attention


def with_gradients(op, q, k, v, g, ids, positions):
    def both(op, q, k, v):
        out, pull = jax.vjp(lambda *qkv: op(*qkv, ids, positions, "train"), q, k, v)
        return out * (ids > 0)[..., None, None], *pull(g)

    return jitted(op, both, q, k, v)


@pytest.mark.parametrize("load_balance", [False, True])
@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk", "full"])
def test_kinds_of_attention(kind, load_balance):
    """Forward and backward equal MaxText's, of tokens in order; the axes are those of its rules."""
    inputs = arrays()
    expected = with_gradients(operation(kind), *inputs)
    order = cpd.zigzag_permutation(T, NUM_RANKS) if load_balance else np.arange(T)
    op = operation(kind, load_balance)
    ours = mock.Mock(wraps=cpd.context_parallel_attention)
    with mock.patch.object(maxtext, "context_parallel_attention", ours), maxtext_attention():
        got = with_gradients(op, *(x[:, order] for x in inputs))
    assert ours.call_args.kwargs["axis_name"] == ("context",)
    assert ours.call_args.kwargs["head_axis"] == ("tensor",)
    for one, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, want[:, order], rtol=0, atol=1e-5)


def test_balanced_needs_tokens_in_order():
    q, k, v, _, ids, positions = arrays()
    with (
        maxtext_attention(algorithm="balanced"),
        pytest.raises(ValueError, match="'balanced' plans attention of tokens in order"),
    ):
        attend(operation(load_balance=True), q, k, v, ids, positions)


def test_the_method_is_restored():
    before = AttentionOp.apply_attention
    with pytest.raises(KeyError), maxtext_attention():
        assert AttentionOp.apply_attention is not before
        raise KeyError
    assert AttentionOp.apply_attention is before
