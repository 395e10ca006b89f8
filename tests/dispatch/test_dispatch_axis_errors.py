"""Arrays of all ranks on a mesh that does not suit the plan: rejected when compiled, or before."""

from typing import Any

import jax
import pytest
from dispatch_cases import CAPACITY, METADATA, T, W, X
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, permuted_mesh

from jax_cp_dispatch import dispatch

# From the compiler; or from lowering, if the program gets a key for the cache on disk.
LATE = jax.errors.JaxRuntimeError, ValueError
pytestmark = pytest.mark.usefixtures("unchecked_types")


def tp_mesh(kind: Any = AxisType.Auto):
    return permuted_mesh((2, W), ("tp", AXIS), kind)


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="x has 33 rows, not a multiple of the 4 ranks"):
        dispatch(X[: W * T].repeat(2, 0)[:33], METADATA, axis_name=AXIS, capacity=9, mesh=tp_mesh())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_metadata_of_one_rank_with_arrays_of_all(kind):
    x = jax.device_put(X, NamedSharding(tp_mesh(kind), P(AXIS, "tp")))
    move = lambda x: dispatch(x, METADATA.get_slice(1), axis_name=AXIS, capacity=CAPACITY)
    with pytest.raises(
        ValueError, match=r"seq_len has shape \[5\]; it needs \[4, S\], the plan of"
    ):
        jax.jit(move)(x)


def test_an_axis_of_another_size():
    """Python reads it from the types or `mesh=`; otherwise the compiler reports our error."""
    move = lambda x, mesh=None: dispatch(x, METADATA, axis_name=AXIS, capacity=CAPACITY, mesh=mesh)
    message = "metadata is for world_size=4 but axis 'cp' has 2 devices. Plan with world_size=2"
    for kind in AxisType.Auto, AxisType.Explicit:
        split = NamedSharding(permuted_mesh((4, 2), ("tp", AXIS), kind), P(AXIS))
        with pytest.raises(ValueError, match=message):
            jax.jit(move)(jax.device_put(X, split))
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda x: move(x, split.mesh))(X)  # noqa: B023
    only_for_the_compiler = NamedSharding(permuted_mesh((4, 2), ("tp", AXIS)), P(AXIS))
    with pytest.raises(LATE, match=message):
        jax.jit(move, in_shardings=only_for_the_compiler)(X)


def test_an_axis_that_the_mesh_of_the_program_lacks():
    x = jax.device_put(X, NamedSharding(permuted_mesh((4, 2), ("tp", "dp")), P("tp")))
    with pytest.raises(LATE, match="'cp' is not an axis of the mesh on which"):
        jax.jit(lambda x: dispatch(x, METADATA, axis_name=AXIS, capacity=CAPACITY))(x)


def test_axes_of_which_only_some_are_manual():
    mesh = permuted_mesh((2, 4), ("pod", "data"))
    move = lambda x: dispatch(x, METADATA, axis_name=("pod", "data"), capacity=CAPACITY)
    run = jax.shard_map(move, mesh=mesh, axis_names={"pod"}, in_specs=P("pod"), out_specs=P("pod"))
    with pytest.raises(ValueError, match=r"only \('pod',\) of axis_name \('pod', 'data'\) are man"):
        jax.jit(run)(X)
