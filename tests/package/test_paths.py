"""The path of a call: the files and functions of the package that it enters, and its checks.

Each call is traced and lowered for this platform, with its gradient. The numbers only go down: a
new capability pays by what it removes. `pytest -s` prints them.
"""

import functools
import gc
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd
from jax_cp_dispatch import experts

PACKAGE = Path(cpd.__file__).parent
CHECKS = ("check", "read", "refuse")  # how their names begin
SEGMENT_IDS = np.repeat([[1, 2, 2, 3]], 32, axis=1)

# Files, functions, and calls of checks.
LIMITS = {
    "balanced": (38, 325, 109),
    "zigzag": (32, 283, 106),
    "ulysses": (31, 258, 87),
    "experts": (19, 149, 131),
    "all_gather_matmul": (21, 157, 30),
}


def arrays(*shapes):
    return [jnp.ones(shape) for shape in shapes]


def attend(algorithm, qkv):
    options = {"axis_name": AXIS, "mesh": mesh_of(8), "segment_ids": SEGMENT_IDS}
    return cpd.context_parallel_attention(*qkv, algorithm=algorithm, **options)


def route_and_return(x):
    index = jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 8
    routing = experts.route(index, num_experts=8, axis_name=AXIS)
    return experts.combine_tokens(experts.dispatch_tokens(x, routing), None, routing)


def multiply(operands):
    return cpd.all_gather_matmul(*operands, axis_name=AXIS, mesh=mesh_of(8))


def call_of(name):
    if name == "experts":
        ranks = {"mesh": mesh_of(8), "in_specs": P(AXIS), "out_specs": P(AXIS)}
        return jax.shard_map(route_and_return, **ranks), jnp.ones((64, 4))
    if name == "all_gather_matmul":
        return multiply, arrays((64, 8), (8, 64))
    return functools.partial(attend, name), arrays((1, 128, 8, 4), *[(1, 128, 2, 4)] * 2)


def entered(function, x):
    """Returns how often each function of the package is called."""
    calls = {}

    def count(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and code.co_name[0] != "<":
            calls[code] = calls.get(code, 0) + 1

    def loss(x):
        return jnp.sum(function(x))

    jax.clear_caches()
    for cached in gc.get_objects():
        if isinstance(cached, functools._lru_cache_wrapper) and PACKAGE.name in cached.__module__:
            cached.cache_clear()
    sys.setprofile(count)
    try:
        jax.jit(jax.value_and_grad(loss)).lower(x)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", LIMITS)
def test_path(name):
    calls = entered(*call_of(name))
    files = {code.co_filename for code in calls}
    checks = sum(n for code, n in calls.items() if code.co_name.strip("_").startswith(CHECKS))
    print(f"{name}: {len(files)} files, {len(calls)} functions, {checks} checks")
    for number, limit in zip((len(files), len(calls), checks), LIMITS[name], strict=True):
        assert number <= limit
