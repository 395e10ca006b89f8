"""What surrounds a call: names in errors, other meshes, modes of JAX, export, scopes in profiles.

The contract asks every operation for what is common; here is what it does not see.
"""

import re
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import metadata_oracle
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxprs import inner_jaxprs
from on_mesh import AXIS, mesh_of, on_ranks

import jax_cp_dispatch as cpd
from jax_cp_dispatch.attention import chunk_exchange, ring_exchange

W, T = 4, 8


def normal(*shape, dtype: Any = np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def plan_to(ranks, num_tokens=T):
    """Returns a plan that sends all tokens of each rank to one."""
    ranks = np.asarray(ranks, np.int32)[:, None]
    fields, _ = metadata_oracle.plan(np.full(ranks.shape, num_tokens), ranks)
    return cpd.Metadata(**fields, world_size=len(ranks))


TO_RANK_0 = plan_to([0] * W)
Q = normal(1, W * T, 2, 8)
IDS = np.repeat([[1, 2, 0]], [20, 8, 4], axis=1)  # padding rows attend to nothing
attend = partial(cpd.context_parallel_attention, axis_name=AXIS)
send = partial(cpd.dispatch, axis_name=AXIS)


# ---- Errors of a running program name the function that was called, in both passes.


def said(run, *operands):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as error:
        jax.block_until_ready(run(*operands))
    return str(error.value)


CHUNKS = dict(zip(("out_chunk", "in_chunk"), cpd.cycles.chunk_maps([[0, 1, 2, 3]]), strict=True))
ABSENT = {"ring_exchange": ring_exchange, "chunk_exchange": partial(chunk_exchange, **CHUNKS)}


@pytest.mark.parametrize("name", ABSENT)
def test_a_missing_rank(name):
    """Of the operations that the contract has no case for."""
    call = partial(ABSENT[name], axis_name=AXIS, deadline=0.2)
    is_late = lambda: jax.lax.axis_index(AXIS) == 1
    run = on_ranks(lambda x: jax.lax.cond(is_late(), lambda x: 2 * x, call, x), mesh_of(W))
    assert f"{name} over axis 'cp': deadline of 200 ms passed" in said(run, normal(W, 1, T))


def test_a_plan_that_exceeds_the_capacity():
    """Of dispatch: `test_docs_errors.py`."""

    def pair(x, plan):
        sizes: Any = {"q_capacity": T, "kv_capacity": W * T}
        return cpd.dispatch_qkv(x, x, plan, plan, axis_name=AXIS, **sizes)[0]

    def transpose(y, plan):
        combine_rows = lambda y: cpd.combine(y, plan, axis_name=AXIS, num_tokens=T)
        return jax.linear_transpose(combine_rows, y)(0 * y)[0]

    for call, name, capacity in (
        (pair, "dispatch_qkv", "q_capacity"),
        (transpose, "the transpose of combine", "capacity"),
    ):
        message = f"{name} over axis 'cp': rank 0 would receive 32 tokens but {capacity} is 8"
        assert message in said(on_ranks(call, mesh_of(W)), normal(W, T), TO_RANK_0)


def test_a_program_on_one_device_raises_value_error():
    """JAX has a faster path for such programs; docs/errors.md says how to catch both errors."""
    run = on_ranks(partial(send, capacity=1), mesh_of(1))
    assert "would receive 8 tokens but capacity is 1" in said(run, normal(1, T), plan_to([0]))


@pytest.mark.parametrize("algorithm", ["ring", "balanced"])
def test_no_deadline_is_the_default_one(algorithm):
    of = partial(attend, mesh=mesh_of(W), algorithm=algorithm)
    default, none = (jax.make_jaxpr(partial(of, **x))(Q, Q, Q) for x in ({}, {"deadline": None}))
    assert str(default) == str(none)


# ---- Arrays that are placed by another mesh than the call's are refused by name, or moved.

KINDS = AxisType.Auto, AxisType.Explicit
REVERSED = plan_to(range(8)[::-1], 2)
X = np.arange(64, dtype=np.float32).reshape(16, 4)
MOVED = {"dispatch": X.reshape(8, 2, 4)[::-1].reshape(16, 4), "all_gather_matmul": X @ X.T}
CALLS = {
    "context_parallel_attention": lambda x, mesh: attend(
        *(x.reshape(1, 16, 1, 4),) * 3, mesh=mesh, algorithm="ring"
    ),
    "shift": lambda x, mesh: cpd.sequence.shift(x[None], 1, mesh=mesh, axis_name=AXIS),
    "dispatch": lambda x, mesh: send(x, REVERSED, capacity=2, mesh=mesh),
    "all_gather_matmul": lambda x, mesh: cpd.all_gather_matmul(
        x, jnp.asarray(X.T), axis_name=AXIS, mesh=mesh
    ),
    "route": lambda x, mesh: (
        cpd.experts.route(
            jnp.asarray(x, jnp.int32) % 8, num_experts=8, axis_name=AXIS, mesh=mesh
        ).row
    ),
}


def on_8_devices(shape, names, kind):
    return Mesh(np.array(jax.devices()).reshape(shape), names, axis_types=(kind,) * len(names))


def placed_elsewhere(kind):
    mesh = on_8_devices((2, 4), ("data", AXIS), kind)
    return jax.device_put(X, NamedSharding(mesh, P(("data", AXIS))))


@pytest.mark.parametrize("of_arrays", KINDS)
@pytest.mark.parametrize(
    "name, kind", [(x, kind) for x in CALLS for kind in KINDS if x not in MOVED or kind == KINDS[0]]
)
def test_a_program_has_one_mesh(name, kind, of_arrays):
    """JAX's own error names neither the operation nor what to do."""
    mesh = on_8_devices(8, (AXIS,), kind)
    is_of = f"data=2 ({of_arrays.name}), cp=4 ({of_arrays.name}), but the call has one with cp=8"
    says = f"^{name}: an array .*{re.escape(is_of)}.* Pass the mesh"
    with pytest.raises(ValueError, match=says):
        jax.jit(lambda x: CALLS[name](x, mesh))(placed_elsewhere(of_arrays))


@pytest.mark.parametrize("name", MOVED)
def test_explicit_axes_reshard(name):
    mesh = on_8_devices(8, (AXIS,), AxisType.Explicit)
    got = jax.jit(lambda x: CALLS[name](x, mesh))(placed_elsewhere(AxisType.Explicit))
    np.testing.assert_array_equal(got, MOVED[name])


def test_outside_jit_dispatch_moves_its_arrays():
    """And those of NumPy, where others are differentiated."""
    mesh = on_8_devices(8, (AXIS,), AxisType.Auto)
    call = CALLS["dispatch"]
    np.testing.assert_array_equal(call(placed_elsewhere(AxisType.Auto), mesh), MOVED["dispatch"])
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda scale: (call(X, None) * scale).sum())(2.0)
    np.testing.assert_array_equal(gradient, X.sum())


# ---- One rank, the first case of a new model: what has no case in the contract.


def test_one_rank():
    run = lambda function, **options: on_ranks(
        partial(function, axis_name=AXIS, **options), mesh_of(1)
    )
    one = {"mesh": mesh_of(1), "segment_ids": IDS}
    ring = attend(Q, Q, Q, algorithm="ring", **one)
    np.testing.assert_allclose(attend(Q, Q, Q, algorithm="auto", **one), ring, atol=2e-5)
    x, w = normal(1, 6, 8), normal(1, 8, 4, seed=1)
    for method in ("auto", "ring_exchange"):
        for function in (cpd.all_gather_matmul, cpd.matmul_reduce_scatter):
            np.testing.assert_allclose(run(function, method=method)(x, w), x @ w, atol=2e-5)
    np.testing.assert_array_equal(run(ring_exchange)(x), x)
    out_chunk, in_chunk = cpd.cycles.chunk_maps([])
    assert run(chunk_exchange, out_chunk=out_chunk, in_chunk=in_chunk)(x[:, :0]).size == 0


# ---- JAX promotes neither ranks nor dtypes; traced only. 64-bit types would mix with ours.


def merged_parts(q, k):
    start, middle, end = (jnp.full((1, 16), n, jnp.int32) for n in (0, 7, 16))
    first = cpd.local_attention(q, k, k, start, middle)
    return cpd.merge_partials(*first, *cpd.local_attention(q, k, k, middle, end))


def biased(x, w, bias):
    return cpd.all_gather_matmul(x, w, bias=bias, axis_name=AXIS, method="ring")


def of_experts(x, weights, **options):
    index = jnp.zeros((T, 2), jnp.int32)
    drops = options or {"overflow": "drop", "weights": weights}
    routing = cpd.experts.route(index, num_experts=8, axis_name=AXIS, capacity=12, **drops)
    rows = cpd.experts.dispatch_tokens(x, routing)
    return cpd.experts.combine_tokens(rows, weights, routing)


def continued(layer, state, *arrays, **options):
    given = {"axis_name": AXIS, "mesh": mesh_of(W), "batch_axis": (), "head_axis": ()}
    of_documents = {"segment_ids": IDS, "initial_state": state, "return_state": True}
    return layer(*arrays, **of_documents, **given, **options)


HEADS, ROWS_OF_HEADS, HELD = (1, W * T, 2, 8), (1, W * T, 2), np.arange(8).reshape(W, 2)
STRICT = {  # a function, of each rank or not, and the shapes of its arrays
    "merged parts": (merged_parts, False, [(1, 16, 4, 8), (1, 16, 2, 8)]),
    "bias": (biased, True, [(W, T, 8), (W, 8, 8), (W, 8)]),
    "experts that drop": (of_experts, True, [(W, T, 8), (W, T, 2)]),
    "experts anywhere": (
        partial(of_experts, physical_to_logical=HELD), True, [(W, T, 8), (W, T, 2)],
    ),
    "state of shift": (
        partial(continued, partial(cpd.sequence.shift, offset=2)), False, [(1, 2, 2, 8), HEADS],
    ),
    "state of causal_conv": (
        partial(continued, cpd.sequence.causal_conv), False, [(1, 2, 2), ROWS_OF_HEADS, (3, 2)],
    ),
    "state of gated_delta_rule": (
        partial(continued, cpd.sequence.gated_delta_rule), False,
        [(1, 2, 8, 8), HEADS, HEADS, HEADS, ROWS_OF_HEADS, ROWS_OF_HEADS],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRICT)
def test_nothing_is_promoted(name):
    """Gradients have the dtypes of their arrays; the contract asks its cases the same."""
    call, of_rank, shapes = STRICT[name]
    arrays = [jnp.asarray(normal(*shape), jnp.bfloat16) for shape in shapes]
    if name == "state of gated_delta_rule":
        arrays[0] = arrays[0].astype(jnp.float32)
    run = on_ranks(call, mesh_of(W), jit=False) if of_rank else call
    total = lambda *arrays: sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(run(*arrays)))
    modes = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(True), modes[0], modes[1], warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        gradients = jax.eval_shape(jax.grad(total, argnums=tuple(range(len(arrays)))), *arrays)
    assert [x.dtype for x in gradients] == [x.dtype for x in arrays]


def test_checkify():
    """The checks of the caller; those that `checkify` adds do not enter shard_map."""

    def loss(q):
        out = attend(q, q, q, mesh=mesh_of(W), algorithm="balanced", segment_ids=IDS)
        checkify.debug_check(jnp.isfinite(out).all(), "attention is not finite")
        return out.sum()

    wrong = Q.copy()
    wrong[0, 5] = np.nan
    checked = jax.jit(checkify.checkify(jax.value_and_grad(loss)))
    assert checked(Q)[0].get() is None
    assert "attention is not finite" in checked(wrong)[0].get()
    with pytest.raises((TypeError, ValueError)):
        jax.eval_shape(checkify.checkify(loss, errors=checkify.float_checks), Q)


# ---- Operations carry scopes of the package, under which a profile of a step shows them.

SCOPES = {
    **dict.fromkeys(("dispatch", "combine"), "cpd.exchange"),
    **dict.fromkeys(("attend_blocks", "local_attention"), "cpd.attention"),
    **dict.fromkeys(("block_gradients", "local_attention_gradients"), "cpd.attention_backward"),
    **dict.fromkeys(("gemm", "grouped_gemm"), "cpd.gemm"),
    "sort": "cpd.plan",  # plans, and the check of the order of tokens
}
ATTENTION = {  # what an algorithm runs; softmax of rings stays in their blocks
    "balanced": {"local_attention", "local_attention_gradients"},
    "zigzag": {"attend_blocks", "block_gradients"},
}


def scopes(jaxpr, outer=""):
    """Yields each primitive with all scopes around it."""
    for equation in jaxpr.eqns:
        stack = f"{outer}/{equation.source_info.name_stack}"
        yield equation.primitive.name, stack
        for inner in inner_jaxprs(equation):
            yield from scopes(inner, stack)


def found(program, *operands):
    """The primitives that have a scope of their own, all of which must be in it."""
    names = set()
    for name, stack in scopes(jax.make_jaxpr(program)(*operands).jaxpr):
        if name in SCOPES:
            assert f"/{SCOPES[name]}" in stack, (name, stack)
            names.add(name)
    return names


def attention_loss(algorithm):
    def loss(q, ids):
        return attend(q, q, q, algorithm=algorithm, mesh=mesh_of(W), segment_ids=ids).sum()

    return loss, jnp.asarray(Q), jnp.asarray(IDS)


@pytest.mark.parametrize("algorithm", ATTENTION)
def test_scopes_of_attention(algorithm):
    loss, *operands = attention_loss(algorithm)
    expected = {"dispatch", "combine", "sort"} | ATTENTION[algorithm]
    assert found(jax.grad(loss), *operands) == expected


def test_scopes_of_gemms_and_experts():
    def multiply(x, w):
        return cpd.all_gather_matmul(x, w, axis_name=AXIS).sum()[None]

    def layer(x, index, w):
        routing = cpd.experts.route(index, num_experts=2 * W, axis_name=AXIS, capacity=T)
        rows = cpd.experts.dispatch_tokens(x, routing)
        rows = cpd.grouped_gemm(rows, w, routing.group_sizes)
        return cpd.experts.combine_tokens(rows, None, routing)

    on_mesh = lambda fn: jax.shard_map(fn, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))
    gradient = lambda fn, *of: jax.grad(lambda *x: on_mesh(fn)(*x).sum(), argnums=of)
    assert found(gradient(multiply, 0, 1), jnp.zeros((T, 8)), jnp.zeros((8 * W, T))) == {"gemm"}
    operands = jnp.zeros((T, 8)), jnp.zeros((T, 2), jnp.int32), jnp.zeros((2 * W, 8, 8))
    assert found(gradient(layer, 0, 2), *operands) >= {"dispatch", "combine", "grouped_gemm"}
    stacks = scopes(jax.make_jaxpr(on_mesh(layer))(*operands).jaxpr)
    rows = [x for name, x in stacks if name == "gather" and "cpd.plan" not in x]
    assert rows and all("/cpd.experts" in stack for stack in rows)


def test_a_trace_of_a_step(tmp_path):
    """The events of a profile name operations of the compiled program, which carry the scopes."""
    loss, *operands = attention_loss("balanced")
    step = jax.jit(jax.grad(loss)).lower(*operands).compile()
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(step(*operands))
    (path,) = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = (event for plane in planes for line in plane.lines for event in line.events)
    ran = {op for event in events if (op := dict(event.stats).get("hlo_op"))}
    names = dict(re.findall(r"([\w.-]+) = .*op_name=\"([^\"]*)\"", step.as_text() or ""))
    scopes = {scope for op in ran for scope in re.findall(r"cpd\.\w+", names.get(op, ""))}
    assert scopes == set(SCOPES.values()) - {"cpd.gemm"}
