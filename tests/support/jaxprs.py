"""What a traced program holds: its equations, those of inner jaxprs too, and how often they run."""

from collections import Counter

import jax


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
