"""Tests that need one GPU: without it they are skipped, or fail if a GPU is required.

Run them with JAX on the GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu`; with
`JAX_CP_DISPATCH_REQUIRE_GPU=1` a missing GPU is a failure.
"""

import os

import jax
import pytest

from jax_cp_dispatch._ranks import runtime


def why_no_gpu():
    if runtime.cuda is None:
        return runtime.cuda_reason
    num_gpus, reason = runtime.cuda.device_count()
    if num_gpus == 0:
        return f"no GPU is here: {reason}"
    if jax.default_backend() != "gpu":
        return f"JAX runs on {jax.default_backend()}; set JAX_PLATFORMS=cuda,cpu"
    return None


@pytest.fixture(autouse=True, scope="session")
def gpu():
    reason = why_no_gpu()
    if reason is not None:
        if os.environ.get("JAX_CP_DISPATCH_REQUIRE_GPU") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
