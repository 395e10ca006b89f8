"""JAX's persistent compilation cache distinguishes calls."""

import subprocess
import sys


def test_a_persistent_cache_distinguishes_calls(tmp_path):
    """With automatic axes a program stores only our callback's address, which caches ignore."""
    program = f"""
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_cp_dispatch import combine, compute_metadata, dispatch
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(2)
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,))
metadata, _ = compute_metadata(np.array([[1, 1], [1, 1]]), np.array([[1, 0], [1, 0]]))
x = jax.device_put(np.arange(4.0), NamedSharding(mesh, P("cp")))
there = jax.jit(lambda x: dispatch(x, metadata, axis_name="cp", capacity=2))
home = jax.jit(lambda x: combine(x, metadata, axis_name="cp", num_tokens=2))
np.testing.assert_array_equal(there(x), [1, 3, 0, 2])
np.testing.assert_array_equal(home(x), [2, 0, 3, 1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
