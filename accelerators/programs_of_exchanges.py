"""The programs that are compiled of movement by a plan: in one call, and beside other work."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from programs_of_attention import balanced_plan
from shapes import HEAD_SIZE, HEADS, KV_HEADS, TOKENS, Program, Shapes, on_ranks

import jax_cp_dispatch as cpd


def _movement(shapes: Shapes) -> cpd.Metadata:
    return shapes.placement.plan.kv_metadata


def rows_of(shapes: Shapes, num_rows: int, heads: int = KV_HEADS) -> jax.ShapeDtypeStruct:
    return shapes.array((num_rows, heads, HEAD_SIZE), jnp.bfloat16, P("cp"))


def _on_each_rank(shapes: Shapes, move: Callable[..., Any], *plans: cpd.Metadata) -> Any:
    """Calls a function of one rank's rows and metadata on every rank."""
    run = on_ranks(shapes, move, P("cp"), P("cp"))
    return lambda *rows: run(*rows, *plans)


def dispatch(shapes: Shapes, *, of_a_rank: bool, implementation: str = "xla") -> Program:
    options = {"capacity": shapes.placement.plan.kv_capacity, "axis_name": "cp"}
    move = functools.partial(cpd.dispatch, implementation=implementation, **options)
    run = lambda x: move(x, _movement(shapes), mesh=shapes.mesh)
    x = rows_of(shapes, shapes.num_tokens)
    each = _on_each_rank(shapes, move, _movement(shapes))
    return Program(each if of_a_rank else run, (x,), (0,))


def combine(shapes: Shapes, *, of_a_rank: bool, implementation: str = "xla") -> Program:
    options = {"num_tokens": TOKENS, "axis_name": "cp"}
    move = functools.partial(cpd.combine, implementation=implementation, **options)
    run = lambda y: move(y, _movement(shapes), mesh=shapes.mesh)
    y = rows_of(shapes, shapes.placement.plan.kv_capacity * shapes.num_ranks)
    each = _on_each_rank(shapes, move, _movement(shapes))
    return Program(each if of_a_rank else run, (y,), (0,))


def _in_two_calls(shapes: Shapes, start: Any, work: Any, weights: Any, *, is_data: bool) -> Program:
    """An exchange beside products of a rank's tokens and the weights; the plan may be data."""
    plan = _movement(shapes)

    def run(x, plan, *weights):
        exchange, x = start(x, plan, *weights)
        return cpd.exchange_done(exchange, beside=work(x, *weights))

    specs = P("cp"), P("cp"), *(P() for _ in weights)
    on_each = on_ranks(shapes, run, specs, P("cp"))
    arrays = [shapes.array((1024, n), jnp.bfloat16, P()) for n in weights]
    x = shapes.array((shapes.num_tokens, 1024), jnp.bfloat16, P("cp"))
    argnums = range(1 + len(weights))
    if not is_data:
        return Program(lambda x, *w: on_each(x, plan, *w), (x, *arrays), tuple(argnums))
    fields, tree = jax.tree.flatten(plan)
    fields = [shapes.array(x.shape, x.dtype, P("cp")) for x in fields]
    with_plan = lambda x, *rest: on_each(
        x, tree.unflatten(rest[len(weights) :]), *rest[: len(weights)]
    )
    return Program(with_plan, (x, *arrays, *fields), tuple(argnums))


def beside_two_products(shapes: Shapes, *, is_data: bool, implementation: str = "xla") -> Program:
    """Keys and values in one exchange beside two independent products."""
    options: dict[str, Any] = {"axis_name": "cp", "implementation": implementation}
    options["capacity"] = shapes.placement.plan.kv_capacity

    def start(x, plan, *_):
        return cpd.dispatch_start((x[:, :512], x[:, 512:]), plan, beside=x, **options)

    work = lambda x, a, b: (x @ a, x @ b)
    return _in_two_calls(shapes, start, work, (1024, 1024), is_data=is_data)


def projections(shapes: Shapes, *, is_data: bool, implementation: str = "xla") -> Program:
    """A layer that projects queries while its keys and values move."""
    options: dict[str, Any] = {"axis_name": "cp", "implementation": implementation}
    options["capacity"] = shapes.placement.plan.kv_capacity

    def start(x, plan, wk, wv, _):
        return cpd.dispatch_start((x @ wk, x @ wv), plan, beside=x, **options)

    work = lambda x, wk, wv, wq: x @ wq
    return _in_two_calls(shapes, start, work, (512, 512, 1024), is_data=is_data)


def return_of_rows(shapes: Shapes, implementation: str = "xla") -> Program:
    """Rows return beside a product."""
    options: dict[str, Any] = {"axis_name": "cp", "implementation": implementation}

    def run(y, plan, x, w):
        exchange, x = cpd.combine_start(y, plan, beside=x, num_tokens=TOKENS, **options)
        return cpd.exchange_done(exchange, beside=x @ w)

    on_each = on_ranks(shapes, run, (P("cp"), P("cp"), P("cp"), P()), P("cp"))
    y = rows_of(shapes, shapes.placement.plan.kv_capacity * shapes.num_ranks)
    x = shapes.array((shapes.num_tokens, 1024), jnp.bfloat16, P("cp"))
    w = shapes.array((1024, 1024), jnp.bfloat16, P())
    return Program(lambda y, x, w: on_each(y, _movement(shapes), x, w), (y, x, w), (0, 1, 2))


def dispatch_qkv(shapes: Shapes) -> Program:
    plan = balanced_plan(shapes)
    move = functools.partial(
        cpd.dispatch_qkv,
        **{"q_capacity": plan.q_capacity, "kv_capacity": plan.kv_capacity},
        **{"axis_name": "cp", "implementation": "xla"},
    )
    rows = tuple(rows_of(shapes, shapes.num_tokens, heads) for heads in (HEADS, KV_HEADS))
    return Program(_on_each_rank(shapes, move, plan.q_metadata, plan.kv_metadata), rows, (0, 1))


def combine_qkv(shapes: Shapes) -> Program:
    plan = balanced_plan(shapes)
    move = functools.partial(
        cpd.combine_qkv,
        **{"q_num_tokens": TOKENS, "kv_num_tokens": TOKENS},
        **{"axis_name": "cp", "implementation": "xla"},
    )
    sizes = (plan.q_capacity, HEADS), (plan.kv_capacity, KV_HEADS)
    rows = tuple(rows_of(shapes, size * shapes.num_ranks, heads) for size, heads in sizes)
    return Program(_on_each_rank(shapes, move, plan.q_metadata, plan.kv_metadata), rows, (0, 1))
