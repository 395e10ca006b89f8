"""Invalid calls of dispatch and combine: each is rejected while it is traced, or compiled.

Of buffers: test_dispatch_buffers.py. Errors in the values of a plan appear at run time: see
test_dispatch.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import metadata_oracle as oracle
import numpy as np
import pytest
from comm_gemm_refusals import trace
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of, permuted_mesh
from refusals import LENGTHS, WHERE, T, W, X, check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch import attention

PLAN = cp.Metadata(**oracle.plan(LENGTHS, WHERE)[0], world_size=W)  # by NumPy: compiles nothing


def plan_of(**fields: Any) -> cp.Metadata:
    return cp.Metadata(**{**vars(PLAN), **fields})


def call(op: str, x: Any = X, plan: Any = PLAN, kv: Any = X, **options: Any):
    """Traces a call of each rank."""
    sizes: dict[str, Any] = {
        "dispatch": {"capacity": W * T},
        "combine": {"num_tokens": T},
        "dispatch_qkv": {"q_capacity": 9, "kv_capacity": 9},
        "combine_qkv": {"q_num_tokens": T, "kv_num_tokens": T},
    }[op]
    options, move = {"axis_name": AXIS, **sizes, **options}, getattr(cp, op)
    if op.endswith("qkv"):
        return trace(lambda q, kv, m: move(q, kv, m, m, **options), x, kv, plan)
    return trace(lambda x, m: move(x, m, **options), x, plan)


dispatch, combine = partial(call, "dispatch"), partial(call, "combine")
dispatch_qkv, combine_qkv = partial(call, "dispatch_qkv"), partial(call, "combine_qkv")


def ring_exchange(**options: Any):
    return trace(lambda x: attention.ring_exchange(x, **{"axis_name": AXIS, **options}), X)


def chunk_exchange(**options: Any):
    maps = cp.cycles.chunk_maps([[0, 1, 2, 3]])
    return trace(lambda x: attention.chunk_exchange(x, *maps, **options), X)


NUMBERS = np.ones((W, W), np.int32)


def ragged(operand: Any = X, output: Any = X, begin=NUMBERS, sizes: Any = NUMBERS, **options):
    move = lambda *x: cp.ragged_all_to_all(*x, axis_name=AXIS, **options)
    return trace(move, operand, output, begin, sizes, begin, begin)


def ragged_outside():
    arrays = map(jnp.asarray, (X[0], X[0], *[NUMBERS[0]] * 4))
    return cp.ragged_all_to_all(*arrays, axis_name=AXIS)


def outside(plan: Any = PLAN, **options: Any):
    """A call outside of any mesh."""
    return cp.dispatch(X[0], plan, axis_name=AXIS, capacity=4, **options)


def on_vmap_axis():
    two, _ = cp.compute_metadata(LENGTHS[:2], WHERE[:2] % 2)
    jax.vmap(lambda x: cp.dispatch(x, two, axis_name="v", capacity=4), axis_name="v")(X[:2])


def dispatch_qkv_outside(kv_metadata: Any):
    q = X.reshape(W * T, 2)
    options: Any = {"axis_name": AXIS, "q_capacity": 9, "kv_capacity": 9, "mesh": mesh_of(W)}
    cp.dispatch_qkv(q, q, PLAN, kv_metadata, **options)


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "dispatch": [
        # Rows.
        (lambda: dispatch(capacity=None), "got neither of capacity and buffer"),
        (lambda: dispatch(buffer=1), "got both of capacity and buffer"),
        (lambda: dispatch(capacity=1.5), "capacity is 1.5; it needs to be a static int"),
        (lambda: dispatch(capacity=True), "capacity is True; it needs to be a static int"),
        (lambda: jax.eval_shape(lambda n: dispatch(capacity=n), 4), "capacity is .*; it needs to"),
        (lambda: dispatch(capacity=-1), "capacity is -1; it needs to be at least 0"),
        (lambda: dispatch(capacity=2**40), "capacity is 1099511627776, but row numbers have 32"),
        (lambda: dispatch(jnp.zeros((W, 1, 2**20)), capacity=2**30), "any machine has"),
        # Arrays.
        (lambda: dispatch((X, X[:, :4])), r"x\[1\] is .*\[4, 2\]; .* with T = 6 as in x\[0\]"),
        (lambda: dispatch(X.astype(jnp.int4)), "x has dtype int4, less than a byte"),
        (lambda: dispatch(jax.random.split(jax.random.key(0), (W, T))), "x has dtype key.*; move"),
        (lambda: dispatch(out=X), r"out holds .* but the result is float32\[24, 2\]"),
        # Ranks.
        (lambda: dispatch(axis_name=3), "axis_name is 3; it needs the name of one mesh"),
        (lambda: dispatch(axis_name="no"), "axis_name 'no' is not an axis of the mesh"),
        (lambda: dispatch(axis_name=()), r"axis_name is \(\); it needs one mesh axis, or"),
        (lambda: dispatch(axis_name=(AXIS,) * 2), r"is \('cp', 'cp'\); it needs one mesh"),
        (on_vmap_axis, "axis_name 'v' is an axis of jax.vmap here"),
        (outside, "no mesh with axis 'cp' was found. Call dispatch in"),
        (lambda: outside(mesh=AXIS), "mesh is 'cp'; it needs to be a jax.sharding.Mesh"),
        # Deadlines, multiprocessors and implementations.
        (lambda: dispatch(deadline=0), "deadline is 0; it needs to be a positive"),
        (lambda: dispatch(deadline=float("nan")), "deadline is nan; it needs to be"),
        (lambda: dispatch(num_comm_sm=0), "num_comm_sm is 0; it needs to be at least 1"),
        (lambda: dispatch(implementation="nccl"), "is 'nccl'; it needs to be 'in_process'"),
        # Plans.
        (lambda: outside((PLAN, None)), "metadata is tuple; it needs to be Metadata"),
        (lambda: dispatch(plan=plan_of(seq_len=LENGTHS * 1.0)), "metadata.seq_len has dtype"),
        (lambda: dispatch(plan=plan_of(dst_offset=PLAN.dst_offset[:, :1])), "metadata.dst_offset"),
        (lambda: dispatch(plan=plan_of(world_size=8)), "world_size=8 but axis 'cp' has 4 devices"),
    ],
    "combine": [
        (lambda: combine(num_tokens=None), "num_tokens is None; it needs to be a static"),
        (lambda: combine(num_tokens=-3), "num_tokens is -3; it needs to be at least 0"),
        (lambda: combine(num_tokens=2**31), "num_tokens is 2147483648, but row numbers"),
        (
            lambda: combine(X + 1j, preferred_element_type=jnp.float32),
            "float32 but the rows are complex64, whose imaginary parts would be lost",
        ),
        (lambda: combine(num_comm_sm=-4), "num_comm_sm is -4; it needs to be at least"),
    ],
    "dispatch_qkv": [
        (lambda: dispatch_qkv(kv_capacity=-1), "kv_capacity is -1; it needs to be at"),
        (lambda: dispatch_qkv(q_capacity=None), "got neither of q_capacity and q_buf"),
        (lambda: dispatch_qkv(kv_buffer=1), "got both of kv_capacity and kv_buffer"),
        (lambda: dispatch_qkv(q_out=X), "only one of q_out and kv_out. Pass both or"),
        (lambda: dispatch_qkv(num_comm_sm=1.5), "num_comm_sm is 1.5; it needs to be"),
        (lambda: dispatch_qkv_outside(PLAN.get_slice(0)), r"metadata.seq_len has shape \[2\]; it"),
    ],
    "combine_qkv": [
        (lambda: combine_qkv(q_num_tokens=-2), "q_num_tokens is -2; it needs"),
        (lambda: combine_qkv(kv_num_tokens=-1), "kv_num_tokens is -1; it needs"),
        (lambda: combine_qkv(num_comm_sm=True), "num_comm_sm is True; it needs to be"),
    ],
    "ragged_all_to_all": [
        (lambda: ragged(output=X.astype(np.int32)), "rows of one dtype"),
        (lambda: ragged(begin=NUMBERS[:, :3], sizes=NUMBERS[:, :3]), "multiple of the 4 ranks"),
        (lambda: ragged(axis_index_groups=[[0, 1, 2, 3, 3]]), "groups of one size"),
        (lambda: ragged(axis_index_groups=[[0], [1, 2, 3]]), "groups of one size"),
        (ragged_outside, "shard_map"),
    ],
    "ring_exchange": [
        (lambda: ring_exchange(axis_name=3), "axis_name is 3; it needs"),
        (lambda: ring_exchange(shift=1.5), "shift is 1.5; it needs to be an integer"),
        (lambda: ring_exchange(deadline=-1), "deadline is -1; it needs"),
    ],
    "chunk_exchange": [(lambda: chunk_exchange(axis_name=3), "axis_name is 3; it needs")],
}


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)


@pytest.mark.parametrize("deadline", [1e10, 1e300])
def test_a_deadline_that_is_practically_infinite(deadline):
    assert dispatch(deadline=deadline).shape == (W, W * T, 2)


# ---- Arrays of all ranks on a mesh that does not suit the plan.

# From the compiler; or from lowering, if the program gets a key for the cache on disk.
LATE = jax.errors.JaxRuntimeError, ValueError
ROWS = X.reshape(W * T, 2)
KINDS = AxisType.Auto, AxisType.Explicit


def move(x, plan: cp.Metadata = PLAN, **options: Any):
    given: dict[str, Any] = {"axis_name": AXIS, "capacity": W * T, **options}
    return cp.dispatch(x, plan, **given)


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="x has 23 rows, not a multiple of the 4 ranks"):
        move(ROWS[:23], mesh=mesh_of(W))


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_one_rank_with_arrays_of_all(kind):
    x = jax.device_put(ROWS, NamedSharding(permuted_mesh((2, W), ("tp", AXIS), kind), P(AXIS)))
    part = PLAN.get_slice(1)
    with pytest.raises(ValueError, match=r"seq_len has shape \[2\]; it needs \[4, S\], the plan"):
        jax.jit(lambda x: move(x, part))(x)


def test_an_axis_of_another_size():
    """Python reads it from the types or `mesh=`; otherwise the compiler reports our error."""
    message = "metadata is for world_size=4 but axis 'cp' has 2 devices. Plan with world_size=2"
    for kind in KINDS:
        split = NamedSharding(permuted_mesh((4, 2), ("tp", AXIS), kind), P(AXIS))
        with pytest.raises(ValueError, match=message):
            jax.jit(move)(jax.device_put(ROWS, split))
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda x: move(x, mesh=split.mesh))(ROWS)  # noqa: B023
    only_for_the_compiler = NamedSharding(permuted_mesh((4, 2), ("tp", AXIS)), P(AXIS))
    with pytest.raises(LATE, match=message):
        jax.jit(move, in_shardings=only_for_the_compiler)(ROWS)


def test_an_axis_that_the_mesh_of_the_program_lacks():
    x = jax.device_put(ROWS, NamedSharding(permuted_mesh((4, 2), ("tp", "dp")), P("tp")))
    with pytest.raises(LATE, match="'cp' is not an axis of the mesh on which"):
        jax.jit(move)(x)


def test_axes_of_which_only_some_are_manual():
    names = "pod", "data"
    run = jax.shard_map(
        lambda x: move(x, axis_name=names), mesh=permuted_mesh((2, 4), names), axis_names={"pod"},
        in_specs=P("pod"), out_specs=P("pod"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"only \('pod',\) of axis_name \('pod', 'data'\) are man"):
        jax.jit(run)(ROWS)
