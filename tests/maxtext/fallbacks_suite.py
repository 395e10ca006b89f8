"""Calls that are left to MaxText: the result is that without the adapter.

In training a warning names the reason, if the sequence is sharded.
"""

import dataclasses
import re
import warnings
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxtext_calls import B, H, K, T, arrays, attend, jitted, operation

import jax_cp_dispatch as cpd
from jax_cp_dispatch.adapters import maxtext, maxtext_attention

MORE = 16  # keys that do not belong to a query
RNG = np.random.default_rng(1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: the operation, further arguments, and keys ahead of those of the queries."""

    kind: str = "global"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_more_keys: int = 0
    order: Any = slice(None)  # of the tokens


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


# A stripe of each device is every fourth token.
STRIPED = np.arange(T).reshape(-1, 4).T.ravel()
ON_GPUS = {"hardware": "gpu", "context_parallel_strategy": "ring", "load_balance": True}
COMPRESSED = {
    "compressed_kv": normal(B, MORE, K, H),
    "compressed_mask": np.where(RNG.random((B, 1, 1, T, MORE)) < 0.5, 0, -1e9).astype(np.float32),
    "decoder_segment_ids_kv": np.concatenate(
        [arrays()[4], RNG.integers(-1, 3, (B, MORE), np.int32)], axis=1
    ),
}

CASES = {
    "indexer_mask": Case(arguments={"indexer_mask": normal(B, T, T)}),
    "moba": Case(options={"moba": True, "moba_chunk_size": 16, "moba_topk": 2}),
    "compressed_mask and decoder_segment_ids_kv and keys of another length": Case(
        arguments=COMPRESSED
    ),
    "decoder_segment_ids_kv": Case(arguments={"decoder_segment_ids_kv": arrays()[4][::-1]}),
    "keys of another length": Case(num_more_keys=MORE),
    "previous_chunk and keys of another length": Case(
        arguments={"previous_chunk": np.zeros((B, MORE))}, num_more_keys=MORE
    ),
    "tokens in stripes": Case(
        options={**ON_GPUS, "context_parallel_reorder_strategy": "striped"}, order=STRIPED
    ),
    "tokens in stripes ": Case(options=ON_GPUS, order=STRIPED),  # "auto" means stripes here
}


@pytest.mark.parametrize("reason, case", CASES.items(), ids=CASES)
def test_what_is_left_to_maxtext(reason, case):
    q, k, v, _, ids, positions = (x[:, case.order] for x in arrays())
    if case.num_more_keys:
        k, v = (np.concatenate([normal(B, case.num_more_keys, K, H), x], axis=1) for x in (k, v))
        ids = np.pad(ids, ((0, 0), (case.num_more_keys, 0)), constant_values=1)
        # Without a chunk before, MaxText has no segment ids for keys without a query.
        ids = ids if "previous_chunk" in case.arguments else None
    op = operation(case.kind, **case.options)
    inputs = q, k, v, ids, positions
    expected = attend(op, *inputs, **case.arguments)
    message = f"^maxtext_attention: got {re.escape(reason.strip())}; MaxText computes it"
    with maxtext_attention(), pytest.warns(UserWarning, match=message):
        got = attend(op, *inputs, **case.arguments)
    np.testing.assert_array_equal(got, expected)


def test_compressed_attention_is_rejected_by_maxtext():
    """Under context parallelism, with the adapter as without."""
    q, k, v, _, ids, positions = arrays()
    with (
        maxtext_attention(),
        pytest.warns(UserWarning, match="got compressed attention; MaxText computes it"),
        pytest.raises(ValueError, match=r"not supported with AttentionType\.COMPRESSED"),
    ):
        attend(operation("compressed"), q, k, v, ids, positions)


def test_without_context_devices_nothing_changes():
    q, k, v, _, ids, positions = arrays()
    op = operation(ici_context_parallelism=1, ici_fsdp_parallelism=4)
    q, k, v, ids, positions = (np.concatenate([x, x]) for x in (q, k, v, ids, positions))
    expected = attend(op, q, k, v, ids, positions)
    with maxtext_attention(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = attend(op, q, k, v, ids, positions)
    np.testing.assert_array_equal(got, expected)


INFERENCE = {
    "prefill": {"model_mode": "prefill"},
    "prefill in chunks": {"model_mode": "prefill", "previous_chunk": jnp.zeros((B, T - MORE))},
    "decoding": {"model_mode": "autoregressive"},
}


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_stays_with_maxtext(name):
    """Keys are those of a cache: with chunks those before, too; one query in decoding."""
    q, k, v, _, ids, positions = arrays()
    rows = {"prefill": slice(None), "prefill in chunks": slice(T - MORE, T)}
    rows = rows.get(name, slice(T - 1, T))
    einsums = {f"{name}_product_einsum": jnp.einsum for name in ("qk", "wv")}
    compute = lambda op, *x: op.apply_attention(*x, None, **INFERENCE[name], **einsums)
    op = operation()
    inputs = q[:, rows], k, v, ids, positions[:, rows]
    expected = jitted(op, compute, *inputs)
    ours = mock.Mock(wraps=cpd.context_parallel_attention)
    with mock.patch.object(maxtext, "context_parallel_attention", ours), maxtext_attention():
        got = jitted(op, compute, *inputs)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert not ours.called
