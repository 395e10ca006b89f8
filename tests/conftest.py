"""Eight virtual CPU devices, quick compilation, and run-time checks of every annotated shape.

Where beartype is not installed, shapes go unchecked.
"""

import functools
import gc
import importlib.util
import os
import sys
import tempfile

import jaxlib.version

# Imports and tracing allocate much that stays; searching it for garbage so often takes time.
gc.set_threshold(50_000)

# Workers and the programs that tests start import the same modules: each is compiled once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Both are read when the backend starts, so they are set before jax is imported.
NUM_DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# jax 0.10 deadlocks with many programs in flight unless its thread pool exceeds the devices.
os.environ.setdefault("PJRT_NPROC", str(2 * NUM_DEVICES))
# Compilation takes most of the suite's time. LLVM's optimizations, and the code generator for
# fusions that newer jaxlibs always use, more than double it. Compiling a program in parts, on many
# threads, takes an eighth more, and so does the traceback of each operation. Programs that a test
# starts inherit this; `full_optimization` and `environment_of_a_user` undo it where optimizations
# matter.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    if jaxlib.version.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
# Workers, and programs that tests start, compile the same programs, most of them operations without
# jit. The first process of the suite makes the cache, and removes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory(prefix="compiled", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
if importlib.util.find_spec("beartype"):
    jaxtyping.install_import_hook("jax_cp_dispatch", "behind_doors.checked")


# The longest first. Otherwise one worker would still run them when the others have ended.
LONG = (
    *("test_native.py", "test_processes.py", "test_examples.py", "test_orders.py"),
    *("test_values.py", "test_mesh_axes.py", "test_latents.py", "test_attention_plans.py"),
    *("test_checkpoint_policies.py", "test_commands.py"),
)


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))
    gc.freeze()


@pytest.fixture
def unchecked_types():
    """Turns the run-time shape checks off, to see the package's own errors as a user does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def full_optimization():
    """Compiles a file's programs with all of LLVM's optimizations, which may change roundings."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    jax.clear_caches()
    yield
    jax.config.update(name, before)
    jax.clear_caches()


@pytest.fixture(scope="module")
def operations_compiled_once():
    """Compiles an operation of a `jax.shard_map` without jit once for all tests of a file.

    JAX makes a function of it, by which it finds the program, and forgets it after each call.
    """
    from jax._src import shard_map, util

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_map, "HashablePartial", functools.cache(util.HashablePartial))
        yield


@pytest.fixture
def environment_of_a_user(monkeypatch):
    """Programs that the test starts compile as they do for a user."""
    for name in ("DISABLE_MOST_OPTIMIZATIONS", "TRACEBACK_IN_LOCATIONS_LIMIT"):
        monkeypatch.delenv(f"JAX_{name}", raising=False)
    for name in ("PJRT_NPROC", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_buffers():
    """Begins and ends without dispatch buffers."""
    from jax_cp_dispatch.buffers import destroy_all_dispatch_buffers

    destroy_all_dispatch_buffers()
    yield
    destroy_all_dispatch_buffers()
