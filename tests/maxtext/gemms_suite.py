"""Overlapped GEMMs in MaxText's own training loop, with context and sequence parallelism.

Context 2 x tensor_sequence 2 x fsdp 2, with attention by the adapter too.
"""

import re
import warnings
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from maxtext_runs import DEADLINE, STEPS, TOLERANCE, losses

import jax_cp_dispatch as cpd
from jax_cp_dispatch._text import say_once
from jax_cp_dispatch.adapters import (
    maxtext_attention,
    maxtext_dense,
    maxtext_gemms,
)

FUNCTIONS = ("all_gather_matmul", "matmul_reduce_scatter")
ORDER = ["context", "tensor_sequence"]
RULES = [[name, ORDER] for name in ("activation_norm_length", "activation_input_length_attn")]
OPTIONS: dict[str, Any] = {
    **{"ici_context_parallelism": 2, "ici_tensor_sequence_parallelism": 2},
    **{"ici_fsdp_parallelism": 2, "context_parallel_load_balance": False},
}
D, N, K, H, F = 32, 4, 2, 8, 64  # of the model
SCATTERED = {(N, H, D), (F, D)}
# Fused, heads of q, k and v are one kernel, and both kernels of the MLP a tuple.
GATHERED = {
    False: {(D, N, H), (D, K, H), (D, F)},
    True: {(D, N + 2 * K, H), ((D, F), (D, F))},
}


def overlapped(steps: int, **options: Any) -> np.ndarray:
    """Returns the losses of a run with both adapters, which says every warning again."""
    say_once.cache_clear()
    attention = maxtext_attention(algorithm="ring", deadline=DEADLINE)
    with maxtext_gemms(method="ring", deadline=DEADLINE):
        return losses(steps, attention, **OPTIONS, **options)


def kernels_of(function: mock.Mock) -> set[Any]:
    """Returns the shapes of all kernels, and tuples of those that share one x."""
    kernels = [call.args[1] for call in function.call_args_list]
    return {tuple(w.shape for w in k) if isinstance(k, tuple) else k.shape for k in kernels}


@pytest.mark.parametrize("is_fused", [False, True])
def test_training(is_fused):
    """The losses are those without overlap, and no tokens are gathered over context."""
    options = {"fused_qkv": is_fused, "fused_mlp": is_fused, "logical_axis_rules": RULES}
    # The same quantization without overlap, since it changes MaxText's first parameters, and on the
    # same mesh, since the order of heads in fused_qkv depends on it.
    plain = lambda x, kernel, dims, split, **_: jax.lax.dot_general(x, kernel, dims)
    with mock.patch.object(maxtext_dense, "multiply", plain):
        want = losses(STEPS, maxtext_gemms(), **OPTIONS, **options)
    functions = {name: mock.Mock(wraps=getattr(cpd, name)) for name in FUNCTIONS}
    with (
        mock.patch.multiple(maxtext_dense, **functions),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        got = overlapped(STEPS, **options)
    assert kernels_of(functions["all_gather_matmul"]) == GATHERED[is_fused]
    assert kernels_of(functions["matmul_reduce_scatter"]) == SCATTERED
    assert not [str(w.message) for w in said if "XLA gathers them" in str(w.message)]
    print(f"GEMMs, {is_fused}: {np.abs(got - want).max():.1e}")
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
def test_each_rule_is_needed(rule):
    """Without it, XLA gathers tokens over context, and a warning says so."""
    message = r"tokens are split over \('context',\) besides .* XLA gathers them over"
    rules = [other for other in RULES if other is not rule]
    with pytest.warns(UserWarning, match=message):
        overlapped(1, logical_axis_rules=rules)


@pytest.mark.parametrize(
    "name, value, options",
    [
        ("quantization", "int8", {}),
        ("num_experts", 4, {"decoder_block": "mixtral", "base_moe_mlp_dim": 64}),
    ],
)
def test_what_is_refused(name, value, options):
    reason = re.escape(f"maxtext_gemms: got {name}={value!r}; omit one of them")
    with pytest.raises(NotImplementedError, match=reason):
        losses(1, maxtext_gemms(), **{**options, name: value})
