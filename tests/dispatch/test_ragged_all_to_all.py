"""`ragged_all_to_all` means what `jax.lax.ragged_all_to_all` does; its gradient adds.

One slice to each rank: tests/contract. Refusals: test_dispatch_refusals.py.
"""

import jax
import numpy as np
import pytest
from comm_gemm_refusals import trace
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, all_fail, mesh_of, on_ranks, permuted_mesh
from refusals import check_rejected

from jax_cp_dispatch import ragged_all_to_all

W, N, M, F = 4, 12, 20, 3


def received(operand, output, begin, size, begin_there, groups=None):
    """The oracle: slice by slice, from JAX's documentation."""
    out = output.copy()
    groups = [list(range(len(operand)))] if groups is None else groups
    for group in groups:
        slices = begin.shape[1] // len(group)
        for rank in group:
            for i in range(begin.shape[1]):
                b, n, there = begin[rank, i], size[rank, i], begin_there[rank, i]
                out[group[i // slices], there : there + n] = operand[rank, b : b + n]
    return out


def draw(seed, slices=1, group=tuple(range(W))):
    """Slices that overlap at their senders, and lie apart in a random order at their receivers."""
    rng = np.random.default_rng(seed)
    num = len(group) * slices
    size = rng.integers(0, 4 // slices + 1, (W, num)).astype(np.int32)
    begin = rng.integers(0, N - size + 1).astype(np.int32)
    there, got = np.zeros_like(size), np.zeros_like(size)
    for me in range(len(group)):
        row = 0
        for at in rng.permutation(num):
            source, u = divmod(at, slices)
            i = me * slices + u
            there[source, i], got[me, at] = row, size[source, i]
            row += size[source, i] + rng.integers(0, 2)
    return begin, size, there, got


def exchange(*operands, **options):
    return ragged_all_to_all(*operands, axis_name=AXIS, **options)


def values(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(-8, 9, (W, n, F)).astype(np.float32) for n in (N, M))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_several_slices_to_each_rank(implementation):
    """A row in several slices gets the sum of their gradients."""
    operand, output = values()
    begin, size, there, got = draw(2, 2)

    def run(operand, output, *plan):
        move = lambda *x: exchange(*x, *plan, implementation=implementation)
        out, pull = jax.vjp(move, operand, output)
        return out, *pull(out)

    out, doperand, doutput = on_ranks(run, mesh_of(W, [3, 1, 0, 2]))(
        operand, output, begin, size, there, got
    )
    want = received(operand, output, begin, size, there)
    np.testing.assert_array_equal(out, want)
    pulled, kept = np.zeros_like(operand), want.copy()
    for rank in range(W):
        for i in range(begin.shape[1]):
            to, b, n, t = i // 2, begin[rank, i], size[rank, i], there[rank, i]
            pulled[rank, b : b + n] += want[to, t : t + n]
            kept[to, t : t + n] = 0
    np.testing.assert_array_equal(doperand, pulled)
    np.testing.assert_array_equal(doutput, kept)


def test_examples_and_several_axes():
    """`jax.vmap` over rows and plans; ranks on two mesh axes."""
    pairs = [(*values(seed), *draw(seed)) for seed in (3, 4)]
    operands = [np.stack(pair, 1) for pair in zip(*pairs, strict=True)]
    mesh, names = permuted_mesh((2, 2), ("a", "b")), ["a", "b"]

    def local(*x):
        x = [a[0] for a in x]
        return jax.vmap(lambda *x: ragged_all_to_all(*x, axis_name=names))(*x)[None]

    rows = P(("a", "b"))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows))(*operands)
    for i, (*given, _) in enumerate(pairs):
        np.testing.assert_array_equal(out[:, i], received(*given))


def test_groups():
    operand, output = values(5)
    groups = [[0, 2], [3, 1]]
    plans = [draw(seed, 1, (0, 1)) for seed in (6, 7)]
    begin, size, there, got = (np.zeros((W, 2), np.int32) for _ in range(4))
    for group, plan in zip(groups, plans, strict=True):
        for x, of_group in zip((begin, size, there, got), plan, strict=True):
            x[group] = of_group[:2]
    run = on_ranks(lambda *x: exchange(*x, axis_index_groups=groups), mesh_of(W))
    out = run(operand, output, begin, size, there, got)
    np.testing.assert_array_equal(out, received(operand, output, begin, size, there, groups))


def test_sizes_that_disagree_are_errors():
    """Also those of two slices between two ranks, if their sum is right."""
    operand, output = values()
    begin, size, there, got = draw(2, 2)
    run = on_ranks(exchange, mesh_of(W))
    by_xla = on_ranks(lambda *x: exchange(*x, implementation="xla"), mesh_of(W))
    wrong = got + np.eye(2 * W, dtype=np.int32)[5] * (np.arange(W) == 1)[:, None]
    swapped = got.reshape(W, W, 2)[:, :, ::-1].reshape(got.shape)
    assert (swapped != got).any()
    for sizes, message in (wrong, "rank 1 expects .* from rank 2"), (swapped, "expects"):
        all_fail(run(operand, output, begin, size, there, sizes), f"ragged_all_to_all.* {message}")
        assert np.isnan(by_xla(operand, output, begin, size, there, sizes)).all()
    all_fail(run(operand, output[:, :2], begin, size, there, got), "but rows of output is 2")


@pytest.mark.parametrize("field", range(4))
def test_numbers_beyond_32_bits(field):
    """Traced ones do not become small again; known ones are refused."""
    operand, output = values()
    plan = [x.astype(np.int64) for x in draw(1)]
    plan[field][1, 2] += 2**32
    with jax.enable_x64(True):
        all_fail(on_ranks(exchange, mesh_of(W))(operand, output, *plan), "ragged_all_to_all")
    of_rank = [x[1] for x in plan]
    name = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")[field]
    says = rf"{name}\[2\] is {of_rank[field][2]}; it needs to be in"
    check_rejected(
        "ragged_all_to_all", lambda: trace(lambda *x: exchange(*x, *of_rank), operand, output), says
    )
