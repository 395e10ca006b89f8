"""Programs of several calls of the contract's cases, in groups of ranks or on arrays of all ranks.

Calls of a program are equal but for their arrays: they follow each other, are independent, are in
loops and branches. Every process compares the results of its own ranks.
"""

import functools
import pathlib
import sys
from typing import Any, NamedTuple

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name) for name in ("contract", "oracles", "support")
)

import jax
import jax.numpy as jnp
import numpy as np
from contract import DATA, TOLERANCE, on_global_arrays, specs_of, split, with_gradients
from jax.sharding import Mesh, PartitionSpec as P
from operations import CASES
from places import AXIS, place_all

# Others take long to compile and exchange as these do, or need certain numbers of ranks.
MOVES = ("dispatch", "combine", "dispatch_qkv", "dispatch_start")
NAMES = (*MOVES, "ragged_all_to_all", "experts", "ring", "all_gather_matmul none")
NAMES += ("all_gather_matmul ring", "matmul_reduce_scatter ring", "matmul_reduce_scatter pipeline")
BY_NAME = {case.name: case for case in CASES if case.name in NAMES}
SETS = 3  # of arrays for a call: a channel has the rows of two calls
SHORT_DEADLINE = 2.0  # of "maybe"
GROUPS_AND_RANKS = P(DATA, AXIS)


class Structure(NamedTuple):
    """What is compiled. A call is a case, and one of `WAYS`."""

    groups: int  # the mesh is groups x ranks
    devices: tuple[int, ...]
    dtype: str
    is_global: bool  # plain jit on arrays of all ranks
    calls: tuple[tuple[str, str], ...]


class Inputs(NamedTuple):
    """The inputs of one run, beside those of the cases: arrays [groups, ranks]."""

    delays: Any  # rounds of arithmetic before each call
    is_here: Any  # the ranks that take part in "maybe"
    flags: Any  # the way of "branch"; the same on all ranks


def at(sets, i):
    return jax.tree.map(lambda x: x[i], sets)


def stack(trees, numpy: Any = np):
    return jax.tree.map(lambda *x: numpy.stack(x), *trees)


def one(results):
    return stack([results], jnp)


def many(run, sets, _):
    """Independent calls, one of them not by an inner function."""
    inner = jax.jit(run)
    return stack([f(*at(sets, i)) for i, f in enumerate((inner, run, inner))], jnp)


def branch(run, sets, inputs):
    return one(
        jax.lax.cond(inputs.flags[0, 0] > 0, run, lambda *_: run(*at(sets, 1)), *at(sets, 0))
    )


def maybe(run, sets, inputs):
    away = lambda *x: jax.tree.map(jnp.zeros_like, jax.eval_shape(run, *x))
    return one(jax.lax.cond(inputs.is_here[0, 0], run, away, *at(sets, 0)))


# From a call, its sets of arrays, and the inputs, to the results of some sets.
WAYS = {
    "many": many,
    "loop": lambda run, sets, _: jax.lax.scan(lambda _, x: (None, run(*x)), None, sets)[1],
    "gradients": lambda run, sets, _: one(run(*at(sets, 0))),
    "branch": branch,
    "maybe": maybe,
}


def chosen_sets(way, flag):
    return {"gradients": [0], "maybe": [0], "branch": [1 - flag]}.get(way, [*range(SETS)])


@functools.cache
def drawn(name, dtype, num_ranks, seed):
    """Returns (floats, others, cotangents) of a case, and (results, gradients)."""
    arrays = BY_NAME[name].arrays(dtype, ranks=num_ranks, seed=seed)
    results, gradients, cotangents = BY_NAME[name].expected(arrays)
    return (*split(arrays), cotangents), (results, gradients)


class Program:
    """One compiled structure."""

    def __init__(self, structure: Structure, *, is_delayed=True):
        self.is_delayed = is_delayed and not structure.is_global
        devices = np.array(jax.devices())[list(structure.devices)]
        self.structure, self.num_ranks = structure, devices.size // structure.groups
        self.mesh = Mesh(devices.reshape(structure.groups, -1), (DATA, AXIS))
        operands, _ = self.draw(np.zeros((len(structure.calls), structure.groups, SETS), int))
        self.specs, outs = [], []
        for (name, way), (floats, others, cotangents) in zip(
            structure.calls, operands, strict=True
        ):
            of = functools.partial(specs_of, axes=(AXIS,), lead=(DATA, None))
            case = BY_NAME[name]
            specs = of(case.specs, floats), of(case.specs, others), of(case.results, cotangents)
            self.specs.append(specs)
            outs.append((specs[2], specs[0] if way == "gradients" else {}))
        run = self.everywhere
        if not structure.is_global:
            run = jax.shard_map(
                run, mesh=self.mesh, in_specs=(self.specs, GROUPS_AND_RANKS), out_specs=outs,
                check_vma=False,
            )  # fmt: skip
        self.run = jax.jit(run)

    def call_of(self, name, way):
        """Returns a function of floats, others and cotangents."""
        options = {"deadline": SHORT_DEADLINE} if way == "maybe" else {}
        call = functools.partial(BY_NAME[name].call, axis_name=AXIS, **options)
        if self.structure.is_global:
            call = on_global_arrays(BY_NAME[name], self.mesh)
        if way == "gradients":
            return with_gradients(call)
        return lambda floats, others, _: (call({**floats, **others}), {})

    def everywhere(self, operands, inputs):
        """What each rank computes; or, on arrays of all ranks, the program."""
        zero, found, before = jnp.zeros(()), [], ""
        for (name, way), sets in zip(self.structure.calls, operands, strict=True):
            if self.is_delayed and before != "maybe":  # XLA's collective has no error
                zero = self.delayed(zero, inputs.delays)
            before = way
            floats, others, cotangents = at(sets, 0)  # of the group
            floats = {name: x + zero.astype(x.dtype) for name, x in floats.items()}
            results = WAYS[way](self.call_of(name, way), (floats, others, cotangents), inputs)
            zeros = [(0 * x).sum().astype(jnp.float32) for x in jax.tree.leaves(results)]
            zero = sum(zeros, jnp.zeros(()))
            found.append(jax.tree.map(lambda x: x[None], results))
        return found

    def delayed(self, zero, delays):
        """Returns zero after the delay of the rank, and a collective of XLA."""
        busy = jnp.broadcast_to(zero, (64, 64))
        busy = jax.lax.fori_loop(0, delays[0, 0], lambda _, a: jnp.sin(a) + 0.5, busy)
        return jax.lax.psum((busy[0, 0] > 1e6).astype(jnp.float32), AXIS)

    def draw(self, seeds):
        """Returns the operands, and the results, of each call: [groups, sets, ...]."""
        dtype, calls = self.structure.dtype, self.structure.calls
        drawn_of = lambda name, seeds: stack(
            [stack([drawn(name, dtype, self.num_ranks, seed) for seed in group]) for group in seeds]
        )
        both = [drawn_of(name, of) for (name, _), of in zip(calls, seeds.tolist(), strict=True)]
        return [x for x, _ in both], [x for _, x in both]

    def inputs(self, flag=0):
        shape = self.structure.groups, self.num_ranks
        return Inputs(np.zeros(shape, "i4"), np.ones(shape, bool), np.full(shape, flag, "i4"))

    def start(self, operands, inputs):
        """Launches the program; the results may not be ready yet."""
        operands = [
            tuple(place_all(x, self.mesh, spec) for x, spec in zip(of, specs, strict=True))
            for of, specs in zip(operands, self.specs, strict=True)
        ]
        return self.run(operands, place_all(inputs, self.mesh, GROUPS_AND_RANKS))

    def check(self, found, expected, flag):
        for call, got, (results, gradients) in zip(
            self.structure.calls, found, expected, strict=True
        ):
            sets, want = chosen_sets(call[1], flag), (results, {})
            if call[1] == "gradients":
                want = results, gradients
            want = jax.tree.map(lambda x, sets=sets: x[:, sets], want)
            check_close(got, want, self.structure.dtype, call)


def check_close(got, expected, dtype, case) -> None:
    """Compares the part of this process's ranks, within the tolerance of the contract."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    named = jax.tree.leaves_with_path(expected)
    for (path, want), x in zip(named, jax.tree.leaves(got), strict=True):
        name = f"{case}{jax.tree_util.keystr(path)}"
        assert x.shape == want.shape and x.dtype == dtype, name
        atol = TOLERANCE[dtype] * max(1.0, np.abs(want).max(initial=0))
        for shard in x.addressable_shards:
            part = np.asarray(shard.data).astype(np.float64)
            np.testing.assert_allclose(part, want[shard.index], rtol=0, atol=atol, err_msg=name)
