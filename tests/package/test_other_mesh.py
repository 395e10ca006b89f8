"""Arrays that are placed by another mesh than the call's are refused by name, or moved.

And arrays that are constants of a program, whose mesh is set.
"""

import re

import jax
import jax.numpy as jnp
import metadata_oracle
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd

KINDS = AxisType.Auto, AxisType.Explicit
REVERSED = np.arange(8, dtype=np.int32)[::-1, None]
PLAN = cpd.Metadata(**metadata_oracle.plan(np.full((8, 1), 2, np.int32), REVERSED)[0], world_size=8)
X = np.arange(64, dtype=np.float32).reshape(16, 4)
CALLS = {
    "context_parallel_attention": lambda x, mesh: cpd.context_parallel_attention(
        *(x.reshape(1, 16, 1, 4),) * 3, mesh=mesh, axis_name="cp", algorithm="ring"
    ),
    "shift": lambda x, mesh: cpd.sequence.shift(x[None], 1, mesh=mesh, axis_name="cp"),
    "dispatch": lambda x, mesh: cpd.dispatch(x, PLAN, axis_name="cp", capacity=2, mesh=mesh),
    "all_gather_matmul": lambda x, mesh: cpd.all_gather_matmul(
        jnp.asarray(x), jnp.asarray(X.T), axis_name="cp", mesh=mesh
    ),
    "route": lambda x, mesh: (
        cpd.experts.route(
            jnp.asarray(x, jnp.int32) % 8, num_experts=8, axis_name="cp", mesh=mesh
        ).row
    ),
}


def mesh_of(shape, names, kind):
    return Mesh(np.array(jax.devices()).reshape(shape), names, axis_types=(kind,) * len(names))


def on(shape, names, kind):
    return jax.device_put(X, NamedSharding(mesh_of(shape, names, kind), P(names)))


MOVED = {"dispatch": X.reshape(8, 2, 4)[::-1].reshape(16, 4), "all_gather_matmul": X @ X.T}
REFUSED = [(name, k) for name in CALLS for k in KINDS if name not in MOVED or k == AxisType.Auto]


@pytest.mark.parametrize("of_arrays", KINDS)
@pytest.mark.parametrize("name, kind", REFUSED)
def test_a_program_has_one_mesh(name, kind, of_arrays):
    """JAX's own error names neither the operation nor what to do."""
    mesh = mesh_of((8,), ("cp",), kind)
    x = on((2, 4), ("data", "cp"), of_arrays)
    says = f"data=2 ({of_arrays.name}), cp=4 ({of_arrays.name}), but the call has one with cp=8"
    with pytest.raises(ValueError, match=f"^{name}: an array .*{re.escape(says)}.* Pass the mesh"):
        jax.jit(lambda x: CALLS[name](x, mesh))(x)


@pytest.mark.parametrize("name", MOVED)
def test_explicit_axes_reshard(name):
    mesh = mesh_of((8,), ("cp",), AxisType.Explicit)
    x = on((2, 4), ("data", "cp"), AxisType.Explicit)
    got = jax.jit(lambda x: CALLS[name](x, mesh))(x)
    np.testing.assert_array_equal(got, MOVED[name])


@pytest.mark.parametrize("cp", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_constants_of_a_program(name, cp):
    """NumPy's and JAX's, also where others are differentiated outside of `jit`."""
    mesh = Mesh(
        np.array(jax.devices())[None], ("data", "cp"), axis_types=(KINDS[cp == KINDS[0]], cp)
    )
    call = lambda x: CALLS[name](x, None)
    with jax.set_mesh(mesh):
        jax.eval_shape(jax.jit(lambda: call(jnp.asarray(X))))
        got, want = jax.jit(lambda: call(X))(), jax.jit(call)(X)
        np.testing.assert_array_equal(got, want)
        if name == "dispatch":
            grad = jax.grad(lambda scale: (call(X) * scale).sum())(2.0)
            np.testing.assert_array_equal(grad, X.sum())


def test_outside_jit_dispatch_moves_its_arrays():
    mesh = mesh_of((8,), ("cp",), AxisType.Auto)
    x = on((2, 4), ("data", "cp"), AxisType.Auto)
    np.testing.assert_array_equal(CALLS["dispatch"](x, mesh), MOVED["dispatch"])
