"""What a traced program holds: its equations, those of inner jaxprs too, and how often they run."""

from collections import Counter

import jax
from jax.extend.core import jaxpr_as_fun


def inner_jaxprs(equation):
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(value):
            yield getattr(value, "jaxpr", value)


def is_jaxpr(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def flattened(jaxpr):
    """All equations, those of an inner jaxpr in place of the one that calls it."""
    for equation in jaxpr.eqns:
        inner = list(inner_jaxprs(equation))
        if not inner:
            yield equation
        for each in inner:
            yield from flattened(each)


def dependences(jaxpr):
    """Yields each equation with the numbers of those whose results it needs, however indirectly.

    Those of a called function stand in place of the call; a loop and a conditional are one each.
    """
    behind, needed = {}, []

    def of(atoms):
        return frozenset().union(*(behind.get(x, frozenset()) for x in atoms if not is_literal(x)))

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            inner = list(inner_jaxprs(equation))
            is_call = len(inner) == 1 and len(inner[0].invars) == len(equation.invars)
            if is_call and equation.primitive.name not in ("scan", "while"):
                for outer, own in zip(equation.invars, inner[0].invars, strict=True):
                    behind[own] = of([outer])
                yield from walk(inner[0])
                for outer, own in zip(equation.outvars, inner[0].outvars, strict=True):
                    behind[outer] = of([own])
            else:
                needs = of(equation.invars)
                behind.update(dict.fromkeys(equation.outvars, needs | {len(needed)}))
                needed.append(needs)
                yield equation, needs

    yield from walk(jaxpr)


def is_literal(atom):
    return hasattr(atom, "val")


def runs(jaxpr):
    """How often each primitive runs: a scan repeats its body; every branch of a cond counts."""
    count = Counter()
    for equation in jaxpr.eqns:
        inner = list(inner_jaxprs(equation))
        if not inner:
            count[equation.primitive.name] += 1
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for each in inner:
            for name, number in runs(each).items():
                count[name] += times * number
    return count


def with_results_of(fn, name, *operands):
    """Computes `fn`, and returns all results of its last equation with or around a primitive."""
    closed = jax.make_jaxpr(fn)(*operands)
    *_, equation = (e for e in closed.jaxpr.eqns if f"= {name}[" in str(e))
    jaxpr = closed.jaxpr.replace(outvars=equation.outvars)
    return jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(*operands)
