"""MaxText's expert parallelism on CPU, by replacing the one operation that XLA lacks there.

Needs MaxText 0.2.5 and Python 3.12: `./run maxtext`.
"""

from typing import Any
from unittest import mock

import jax
import numpy as np
from maxtext_runs import STEPS, TOLERANCE, losses

import jax_cp_dispatch as cpd

MIXTRAL: dict[str, Any] = {
    **{"decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2},
    **{"base_moe_mlp_dim": 64, "sparse_matmul": True, "megablox": False},
}


def test_training():
    """Experts on four ranks equal experts on one, gradients included."""
    moved = mock.Mock(wraps=cpd.ragged_all_to_all)
    with mock.patch.object(jax.lax, "ragged_all_to_all", moved):
        got = losses(STEPS, **MIXTRAL, ici_expert_parallelism=4, ici_fsdp_parallelism=2)
    assert moved.called
    want = losses(STEPS, **MIXTRAL, ici_fsdp_parallelism=8)
    print(f"experts: {np.abs(got - want).max():.1e}")
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    assert got[-1] < 0.9 * got[0]
