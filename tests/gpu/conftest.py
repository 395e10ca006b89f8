"""Tests that need one GPU: without it they are skipped, or fail if a GPU is required.

Run them with JAX on the GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu`; with
`JAX_CP_DISPATCH_REQUIRE_GPU=1` a missing GPU is a failure. With
`JAX_CP_DISPATCH_TEST_LIMIT=SECONDS` a test that takes longer ends its process, with all stacks.
"""

import faulthandler
import os
import time

import jax
import jax.numpy as jnp
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from inner import gpus_here

LIMIT = float(os.environ.get("JAX_CP_DISPATCH_TEST_LIMIT", "0"))


def why_no_gpu():
    num_gpus, reason = gpus_here()
    if num_gpus == 0:
        return reason
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


@pytest.fixture(autouse=True)
def limited(request):
    if LIMIT > 0:
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=stderr_of(request.config))
    yield
    faulthandler.cancel_dump_traceback_later()


def why_the_gpu_is_dead(touch=lambda: jax.block_until_ready(jnp.zeros(8) + 1)):
    """Returns the error of any further work on the GPU, or None."""
    try:
        touch()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def stderr_of(config):
    """Returns the descriptor of the real standard error, which pytest keeps while it captures."""
    return config.stash.get(fault_handler_stderr_fd_key, 2)


_dead: list[tuple[str, int]] = []  # the error, and where to print it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """After a failure on a GPU, ends the process if its context is dead: all else would fail too.

    With pytest-xdist another worker takes the remaining tests.
    """
    report = yield
    if report.failed and call.when == "call" and jax.default_backend() == "gpu":
        reason = why_the_gpu_is_dead()
        if reason is not None:
            _dead.append((reason, stderr_of(item.config)))
            report.sections.append(("the GPU after this test", reason))
    return report


def pytest_runtest_logfinish(nodeid):
    if _dead:  # now the report has been sent
        reason, stderr = _dead[0]
        text = f"\n{nodeid}: ends this process, its GPU context is dead: {reason}\n"
        os.write(stderr, text.encode())
        time.sleep(0.5)
        os._exit(70)
