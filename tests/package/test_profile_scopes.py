"""Operations carry scopes of the package, under which a profile of a step shows them."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import inner_jaxprs
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd
from jax_cp_dispatch import experts

W, T = 4, 32
EXCHANGES = dict.fromkeys(("dispatch", "combine", "ppermute", "all_to_all"), "cpd.exchange")
SCOPES = EXCHANGES | {
    **dict.fromkeys(("attend_blocks", "local_attention"), "cpd.attention"),
    **dict.fromkeys(("block_gradients", "local_attention_gradients"), "cpd.attention_backward"),
    **dict.fromkeys(("gemm", "grouped_gemm"), "cpd.gemm"),
    "sort": "cpd.plan",  # plans, and the check of the order of tokens
}
ATTENTION = {  # what an algorithm runs; softmax of rings stays in their blocks
    "balanced": {"local_attention", "local_attention_gradients"},
    "zigzag": {"ppermute", "attend_blocks", "block_gradients"},
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
        options = {"mesh": mesh_of(W), "axis_name": AXIS, "segment_ids": ids}
        return cpd.context_parallel_attention(q, q, q, algorithm=algorithm, **options).sum()

    return loss, jnp.ones((1, T, 2, 8)), jnp.ones((1, T), jnp.int32)


@pytest.mark.parametrize("algorithm", ATTENTION)
def test_attention(algorithm):
    loss, *operands = attention_loss(algorithm)
    expected = {"dispatch", "combine", "sort"} | ATTENTION[algorithm]
    assert found(jax.grad(loss), *operands) == expected


def test_gemm():
    matmul = partial(cpd.all_gather_matmul, axis_name=AXIS)
    specs = {"in_specs": (P(AXIS), P(None, AXIS)), "out_specs": P(None, AXIS)}
    program = jax.shard_map(matmul, mesh=mesh_of(W), **specs)
    loss = jax.grad(lambda x, w: program(x, w).sum(), argnums=(0, 1))
    assert found(loss, jnp.zeros((T, 8)), jnp.zeros((8, T))) == {"gemm"}


def test_experts():
    def layer(x, index, w):
        routing = experts.route(index, num_experts=2 * W, axis_name=AXIS, capacity=T)
        rows = experts.dispatch_tokens(x, routing)
        return experts.combine_tokens(cpd.grouped_gemm(rows, w, routing.group_sizes), None, routing)

    program = jax.shard_map(layer, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))
    operands = jnp.zeros((T, 8)), jnp.zeros((T, 2), jnp.int32), jnp.zeros((2 * W, 8, 8))
    loss = jax.grad(lambda *x: program(*x).sum(), argnums=(0, 2))
    assert found(loss, *operands) >= {"dispatch", "combine", "grouped_gemm"}
    stacks = scopes(jax.make_jaxpr(program)(*operands).jaxpr)
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
