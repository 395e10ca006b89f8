"""Every kind of attention in single calls of MaxText's `AttentionOp`."""

from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx
from maxtext.layers.attention_op import AttentionOp  # pyright: ignore[reportMissingImports]
from maxtext_calls import NUM_RANKS, N, T, arrays, attend, jitted, operation

import jax_cp_dispatch as cpd
from jax_cp_dispatch.adapters import maxtext, maxtext_attention
from jax_cp_dispatch.documents import zigzag_permutation


def results(op, inputs, **asked):
    """Returns the output, gradients, and the largest logits if asked for."""

    def both(op, q, k, v, g, ids, positions, sinks, is_image):
        def attend(q, k, v, sinks, **more):
            of_tokens = {"bidirectional_mask": is_image, "sinks": sinks}
            return op(q, k, v, ids, positions, "train", **of_tokens, **more)

        out, pull = jax.vjp(attend, q, k, v, sinks)
        attend(q, k, v, sinks, **asked)
        largest = [x.max(0) for x in jax.tree.leaves(nnx.pop(op, nnx.Intermediate))]
        *gradients, of_sinks = pull(g)
        of_sinks = [] if of_sinks is None else [of_sinks]
        return [out * (ids > 0)[..., None, None], *gradients], of_sinks + largest

    return jitted(op, both, *inputs)


def check(kind: str, load_balance: bool, expected, inputs, order, **asked) -> None:
    """Compares with MaxText's results; the axes are those of its rules."""
    ours = mock.Mock(wraps=cpd.context_parallel_attention)
    stored = [x[:, order] if np.ndim(x) > 1 else x for x in inputs]
    with mock.patch.object(maxtext, "context_parallel_attention", ours), maxtext_attention():
        of_tokens, of_heads = results(operation(kind, load_balance), stored, **asked)
    assert ours.call_args.kwargs["axis_name"] == ("context",)
    assert ours.call_args.kwargs["head_axis"] == ("tensor",)
    in_order = [x[:, np.argsort(order)] for x in of_tokens]
    for got, want in zip([*in_order, *of_heads], [*expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


KINDS = ("global", "local_sliding", "chunk", "block_diffusion", "full")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_order = pytest.mark.parametrize("load_balance", [False, True])


@each_order
@each_kind
def test_kinds_of_attention(kind, load_balance):
    """Forward and backward equal MaxText's. With load balance it counts chunks in documents."""
    inputs = [*arrays(), None, None]
    order = zigzag_permutation(T, NUM_RANKS) if load_balance else np.arange(T)
    stored = [x if x is None else x[:, order] for x in inputs]
    of_tokens, _ = results(operation(kind, load_balance), stored)
    check(kind, load_balance, ([x[:, np.argsort(order)] for x in of_tokens], []), inputs, order)


@each_order
@each_kind
def test_sinks_images_and_largest_logits(kind, load_balance):
    """As MaxText's of tokens in order; its own load balance splits images."""
    q, k, v, g, ids, positions = arrays()
    is_image = (ids > 0) & (positions >= 2) & (positions < 14)
    ids = ids + 1  # MaxText's largest logits are also of padding
    if load_balance:  # one document, in which chunks count as in the row
        ids, positions = np.ones_like(ids), np.tile(np.arange(T, dtype=np.int32), (len(ids), 1))
    sinks = np.random.default_rng(1).normal(1, 1, N).astype(np.float32)
    inputs, asked = [q, k, v, g, ids, positions, sinks, is_image], {"record_max_logits": True}
    order = zigzag_permutation(T, NUM_RANKS) if load_balance else np.arange(T)
    check(kind, load_balance, results(operation(kind), inputs, **asked), inputs, order, **asked)


def test_balanced_needs_tokens_in_order():
    q, k, v, _, ids, positions = arrays()
    with (
        maxtext_attention(algorithm="balanced"),
        pytest.raises(ValueError, match="'balanced' needs tokens in packed order"),
    ):
        attend(operation(load_balance=True), q, k, v, ids, positions)


def test_the_method_is_restored():
    before = AttentionOp.apply_attention
    with pytest.raises(KeyError), maxtext_attention():
        assert AttentionOp.apply_attention is not before
        raise KeyError
    assert AttentionOp.apply_attention is before
