"""JAX's persistent compilation cache, and serialized programs, with calls on global arrays."""

import subprocess
import sys

START = """
import sys
import jax, numpy as np
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_cp_dispatch import all_gather_matmul, combine, compute_metadata, dispatch
from jax_cp_dispatch import matmul_reduce_scatter
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(4)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
mesh = jax.make_mesh((2, 2), ("cp", "tp"), axis_types=(AxisType.Auto,) * 2)
metadata, _ = compute_metadata(np.array([[1, 1], [1, 1]]), np.array([[1, 0], [1, 0]]))
place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
"""

ADDRESS_IGNORED = """
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
x = place(np.arange(4.0), "cp")
there = jax.jit(lambda x: dispatch(x, metadata, axis_name="cp", capacity=2))
home = jax.jit(lambda x: combine(x, metadata, axis_name="cp", num_tokens=2))
np.testing.assert_array_equal(there(x), [1, 3, 0, 2])
np.testing.assert_array_equal(home(x), [2, 0, 3, 1])
"""

SECOND_START = """
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.split("/")[-1]))

def loss(w, x):
    x = dispatch(x, metadata, axis_name="cp", capacity=2)
    x = combine(2 * x, metadata, axis_name="cp", num_tokens=2)
    h = all_gather_matmul(x, w, axis_name="tp", mesh=mesh)
    return matmul_reduce_scatter(h, w.T, axis_name="tp", mesh=mesh).sum()

there = lambda x, **mesh: dispatch(x, metadata, axis_name="cp", capacity=2, **mesh)
row = np.arange(4.0)
with jax.set_mesh(mesh):
    np.testing.assert_array_equal(jax.jit(there)(row), [1, 3, 0, 2])
with jax.set_mesh(jax.make_mesh((4,), ("other",), axis_types=(AxisType.Auto,))):
    np.testing.assert_array_equal(jax.jit(lambda x: there(x, mesh=mesh))(row), [1, 3, 0, 2])
x, w = place(np.arange(16.0).reshape(4, 4), "cp", None), place(np.eye(4), None, "tp")
step = jax.jit(jax.grad(loss)).lower(w, x).compile()
hits, misses = (seen.count(f"cache_{what}") for what in ("hits", "misses"))
programs = [step]
if not hits:  # JAX cannot serialize on CPU what it has read from the cache
    serialized = serialize_executable.serialize(step)
    programs.append(serialize_executable.deserialize_and_load(*serialized))
want = 2 * np.asarray(x).sum(0)
for run in programs:
    np.testing.assert_allclose(run(w, x), want[:, None] + want, rtol=1e-6)
print(hits, misses)
"""


def run(program, folder):
    command = [sys.executable, "-c", START + program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_cache_that_ignores_addresses_distinguishes_calls(tmp_path):
    run(ADDRESS_IGNORED, tmp_path)


def test_the_second_start_compiles_nothing(tmp_path, monkeypatch):
    """Unless the process differs in what the parts of the devices read from it."""
    hits, misses = map(int, run(SECOND_START, tmp_path))
    assert hits == 0 < misses
    assert run(SECOND_START, tmp_path) == [str(misses), "0"]
    monkeypatch.setenv("JAX_CP_DISPATCH_DEADLINE", "7")
    assert run(SECOND_START, tmp_path) == [str(misses - 3), "3"]
