"""The path of a call: the files and functions of the package that it enters, and its checks.

Each call is traced and lowered for this platform, with its gradient; and q alone is followed. The
numbers only go down: a new capability pays by what it removes. `pytest -s` prints them.
"""

import dataclasses
import functools
import gc
import inspect
import itertools
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
SEGMENT_IDS = np.repeat([[1, 2, 2, 3]], 32, axis=1)

# Files, functions, and calls of checks.
LIMITS = {
    "balanced": (36, 220, 81),
    "zigzag": (30, 207, 73),
    "ulysses": (29, 179, 58),
    "experts": (19, 108, 98),
    "all_gather_matmul": (18, 106, 24),
}
# Files, and changes of file, of functions of balanced attention that get q, forward.
LIMITS_OF_Q = (15, 49)
NUM_HEADS, SIZE = 14, 5  # of q, for 2 KV heads: no other array ends with 14 or 7, rows and 5


def attend(algorithm, qkv):
    options = {"axis_name": AXIS, "mesh": mesh_of(8), "segment_ids": SEGMENT_IDS}
    return cpd.context_parallel_attention(*qkv, algorithm=algorithm, **options)


def route_and_return(x):
    index = jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 8
    routing = experts.route(index, num_experts=8, axis_name=AXIS)
    return experts.combine_tokens(experts.dispatch_tokens(x, routing), None, routing)


def call_of(name):
    if name == "experts":
        ranks = {"mesh": mesh_of(8), "in_specs": P(AXIS), "out_specs": P(AXIS)}
        return jax.shard_map(route_and_return, **ranks), jnp.ones((64, 4))
    if name == "all_gather_matmul":
        multiply = functools.partial(cpd.all_gather_matmul, axis_name=AXIS, mesh=mesh_of(8))
        return lambda x: multiply(*x), [jnp.ones((64, 8)), jnp.ones((8, 64))]
    return functools.partial(attend, name), [jnp.ones((1, 128, heads, 4)) for heads in (8, 2, 2)]


def entered(function, x, counts=lambda frame: True):
    """Traces and lowers twice; returns the code of each call of the second time that counts."""
    calls = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and counts(frame):
            calls.append(code)

    jax.jit(function).lower(x)
    jax.clear_caches()
    for cached in gc.get_objects():
        if isinstance(cached, functools._lru_cache_wrapper) and PACKAGE.name in cached.__module__:
            cached.cache_clear()
    sys.setprofile(note)
    try:
        jax.jit(function).lower(x)
    finally:
        sys.setprofile(None)
    return calls


def gets_q(frame):
    given = inspect.getargvalues(frame)
    return holds_q([given.locals.get(str(x)) for x in (*given.args, *given[1:3])])


def holds_q(x):
    """Whether an argument is q, its rows or tiles, or a record of them."""
    if dataclasses.is_dataclass(x) and type(x).__module__.startswith(PACKAGE.name):
        x = vars(x)
    if isinstance(x, dict | tuple | list):
        return any(map(holds_q, x.values() if isinstance(x, dict) else x))
    shape = getattr(x, "shape", None)
    dims = shape if isinstance(shape, tuple) else ()
    return dims[-1:] == (SIZE,) and bool({NUM_HEADS, NUM_HEADS // 2} & set(dims))


@pytest.mark.parametrize("name", LIMITS)
def test_path(name):
    function, x = call_of(name)
    calls = entered(jax.value_and_grad(lambda x: jnp.sum(function(x))), x)
    codes = [code for code in calls if code.co_name[0] != "<"]
    checks = sum(code.co_name.strip("_").startswith(("check", "read", "refuse")) for code in codes)
    found = len({code.co_filename for code in codes}), len(set(codes)), checks
    print("{}: {} files, {} functions, {} checks".format(name, *found))
    assert np.all(np.array(found) <= LIMITS[name])


def test_path_of_q():
    q, *kv = (jnp.ones((1, 128, *x)) for x in ((NUM_HEADS, SIZE), (2, SIZE), (2, 3)))
    calls = entered(lambda q: attend("balanced", (q, *kv)), q, gets_q)
    files = [code.co_filename for code in calls]
    found = len(set(files)), sum(a != b for a, b in itertools.pairwise(files))
    print("q alone: {} files, {} changes of file".format(*found))
    assert np.all(np.array(found) <= LIMITS_OF_Q)
