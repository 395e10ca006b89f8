"""Eight virtual CPU devices, and run-time checks of every annotated shape, for the whole suite.

Where beartype is not installed, shapes go unchecked.
"""

import importlib.util
import os

# Both are read when the backend starts, so they are set before jax is imported.
NUM_DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# jax 0.10 deadlocks with many programs in flight unless its thread pool exceeds the devices.
os.environ.setdefault("PJRT_NPROC", str(2 * NUM_DEVICES))

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
if importlib.util.find_spec("beartype"):
    jaxtyping.install_import_hook("jax_cp_dispatch", "beartype.beartype")


@pytest.fixture
def unchecked_types():
    """Turns the run-time shape checks off, to see the package's own errors as a user does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def no_buffers():
    """Begins and ends without dispatch buffers."""
    from jax_cp_dispatch.buffers import destroy_all_dispatch_buffers

    destroy_all_dispatch_buffers()
    yield
    destroy_all_dispatch_buffers()
