"""The programs of ring, zigzag and Hamilton attention: exchanges come first, without copies."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import dependences, flattened, inner_jaxprs
from on_mesh import AXIS, mesh_of
from sequences import Case

CASES = [  # and their number of chunks
    (Case("ring", 3, 8), 1),
    (Case("zigzag", 4, 12, zigzag=True), 1),
    (Case("hamilton", 5, 16, zigzag=True), 4),
    (Case("hamilton", 4, 12, zigzag=True), 3),  # direct
    (Case("hamilton", 6, 12, zigzag=True, nodes=3), 2),
]


def program(case):
    """Returns the function of all ranks, and the shapes of q, k, v."""
    rows = P(None, AXIS)
    on_ranks = jax.shard_map(
        lambda given, *qkv: case.function(*qkv, **given),
        mesh=mesh_of(case.num_ranks), in_specs=rows, out_specs=rows,
    )  # fmt: skip
    attend = partial(on_ranks, case.given())
    shape = case.batch, case.num_ranks * case.rows
    sizes = zip((case.heads[0], case.heads[1], case.heads[1]), (8, 8, 4), strict=True)
    return attend, [jax.ShapeDtypeStruct((*shape, *size), case.dtype) for size in sizes]


def loops(jaxpr):
    """Yields all scans over steps as (length, equations); scans over blocks are inside them."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"], list(flattened(equation.params["jaxpr"].jaxpr))
        else:
            for inner in inner_jaxprs(equation):
                yield from loops(inner)


def loop_of_steps(case, implementation):
    """Returns the exchanges and attention calls of the loop, in order, and the bytes per step."""
    attend, operands = program(dataclasses.replace(case, implementation=implementation))
    jaxpr = jax.make_jaxpr(attend)(*operands).jaxpr
    by_xla = ("ppermute", "all_to_all")
    kinds = by_xla if implementation == "xla" else ("dispatch", *by_xla)
    ((length, equations),) = (
        (length, equations)
        for length, equations in loops(jaxpr)
        if any(e.primitive.name in kinds for e in equations)
    )
    assert length == case.num_ranks - 1
    in_loop, anywhere = (
        sum(e.primitive.name in kinds for e in each) for each in (equations, flattened(jaxpr))
    )
    gathers = int(case.zigzag and implementation != "xla")  # of segment ids, before the loop
    assert in_loop + gathers == anywhere
    order = [e.primitive.name for e in equations if e.primitive.name in (*kinds, "attend_blocks")]
    sent = [e.invars[0].aval for e in equations if e.primitive.name in by_xla]
    num_bytes = sum(x.size * x.dtype.itemsize for x in sent)
    if "all_to_all" in order:  # one part of which stays
        num_bytes -= num_bytes // case.num_ranks
    return order, num_bytes


@pytest.mark.parametrize("case, num_chunks", CASES, ids=str)
def test_exchange_comes_before_attention(case, num_chunks):
    """n - 1 exchanges, all in the loop; each moves as many bytes as a ring step, in chunks."""
    all_links = 1 < num_chunks == case.num_ranks - 1
    by_xla = ["all_to_all"] * 2 if all_links else ["ppermute"] * 2 * num_chunks  # keys and values
    order, num_bytes = loop_of_steps(case, "xla")
    assert order == [*by_xla, "attend_blocks"]
    assert num_bytes == case.rows * case.heads[1] * (8 + 4) * 4
    # If no implementation is named, both are traced, and lowering selects one.
    order, _ = loop_of_steps(case, None)
    assert order == ["dispatch", *by_xla, "attend_blocks"]


@pytest.mark.parametrize("case, num_chunks", CASES, ids=str)
def test_exchanges_of_the_backward_pass(case, num_chunks):
    """Keys move n - 1 times, gradients n times; in the loop both are sent before attention."""
    attend, operands = program(dataclasses.replace(case, implementation="xla"))
    q, _, v = operands
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    jaxpr = jax.make_jaxpr(lambda out, *x: jax.vjp(attend, *x)[1](out))(out, *operands).jaxpr
    kinds = ("ppermute", "all_to_all")
    attention = ("attend_blocks", "block_gradients")
    names = lambda equations: [e.primitive.name for e in equations]
    of_steps = [
        (length, [name for name in names(equations) if name in (*kinds, *attention)])
        for length, equations in loops(jaxpr)
        if set(names(equations)) & set(kinds)
    ]
    (forward, exchange), (backward, both) = of_steps
    assert (forward, backward) == (case.num_ranks - 1, case.num_ranks - 2)
    exchange.remove("attend_blocks")
    assert both == [*exchange, *exchange, "block_gradients"]
    anywhere = sum(name in kinds for name in names(flattened(jaxpr)))
    outside = anywhere - 3 * len(exchange)
    assert outside == 3 * len(exchange)  # of keys: step 1; of gradients: the last two steps


def steps_of(jaxpr):
    """Yields the bodies of all loops over steps: of the scans that exchange something."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"].jaxpr
            if {e.primitive.name for e in flattened(body)} & EXCHANGES:
                yield body
        else:
            for inner in inner_jaxprs(equation):
                yield from steps_of(inner)


EXCHANGES = {"dispatch", "combine", "ppermute", "all_to_all"}
ATTENTION = {"attend_blocks", "block_gradients"}


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("case, num_chunks", CASES, ids=str)
def test_exchange_and_attention_of_a_step_are_independent(case, num_chunks, implementation):
    """In both passes, so that a compiler may run them at the same time on any platform."""
    attend, operands = program(dataclasses.replace(case, implementation=implementation))
    gradient = jax.grad(lambda *x: jnp.sum(attend(*x)), argnums=(0, 1, 2))
    bodies = list(steps_of(jax.make_jaxpr(gradient)(*operands).jaxpr))
    assert len(bodies) == 2  # of the forward pass, and of the backward pass
    for body in bodies:
        kinds, needed = [], []
        for equation, needs in dependences(body):
            inner = (e for x in inner_jaxprs(equation) for e in flattened(x))
            names = {equation.primitive.name, *(e.primitive.name for e in inner)}
            kinds.append([bool(names & EXCHANGES), bool(names & ATTENTION)])
            needed.append(needs)
        assert [True, False] in kinds and [False, True] in kinds and [True, True] not in kinds
        for kind, needs in zip(kinds, needed, strict=True):
            other = kind[::-1]
            assert not any(kind) or all(kinds[x] != other for x in needs)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_exchange_comes_before_attention_in_the_compiled_program(implementation):
    """XLA's schedule, which is executed, keeps this order."""
    case = Case("hamilton", 3, 8, zigzag=True, implementation=implementation)
    attend, operands = program(case)
    text = str(jax.jit(attend).lower(*operands).compile().as_text())
    assert "is_scheduled=true" in text.splitlines()[0]
    kinds = re.compile(r" = .*? (all-to-all|custom-call|while)(?:-start)?\(")
    in_order = [kinds.findall(computation) for computation in text.split("\n\n")]
    with_exchange = [found for found in in_order if set(found) - {"while"}]
    expected = ["custom-call"] if implementation is None else ["all-to-all"] * 2
    loop, *before = with_exchange
    assert loop == [*expected, "while"]
    assert before in ([], [["custom-call", "while", "while"]])  # the ids of all ranks come first
    assert '"known_trip_count":{"n":"2"}' in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks, zigzag", [(3, True), (7, True), (7, False)])
def test_residuals_of_the_backward_pass(num_ranks, zigzag, dtype):
    """q, k, v, out in float32, lse and the key ranges of the rows; nothing per step."""
    case = Case("hamilton", num_ranks, 60, zigzag=zigzag, dtype=dtype)
    attend, operands = program(case)
    residuals = jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1], *operands)
    q, k, v = operands
    num_tokens, (N, _) = q.shape[1], case.heads
    out = num_tokens * N * v.shape[3] * 4
    lse, ranges = num_tokens * N * 4, num_tokens * 2 * 4
    needed = num_bytes([q, k, v]) + out + lse + ranges
    tables = 16 * 4 * num_ranks**2  # destinations of half the rows in zigzag order
    assert needed <= num_bytes(residuals) <= needed + tables


def num_bytes(tree):
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
