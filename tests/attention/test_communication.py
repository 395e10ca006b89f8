"""ring_exchange and chunk_exchange: values, transposes, errors, and the compiled collectives.

Over one rank: tests/package. Of stages of a pipeline: test_transformations.py.
"""

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch.attention import chunk_exchange, ring_exchange
from jax_cp_dispatch.cycles import chunk_maps, hamiltonian_cycles, two_level_cycles

W = 5
ORDER = [2, 0, 4, 3, 1]
SHIFTS = [1, -1, 0, 3, 7, -12]
RING = [[0, 1, 2, 3, 4]]
MAPS = {  # the second map leaves some links without a chunk
    "all links": chunk_maps(hamiltonian_cycles(W)),
    "two cycles": chunk_maps([RING[0], RING[0][::-1]]),
}


@pytest.fixture(params=["in_process", "xla"])
def implementation(request):
    return request.param


def draw(*shape):
    """Returns small integers in arrays of several dtypes and numbers of dimensions."""
    integers = np.random.default_rng(0).integers(-9, 10, (*shape, 2, 3))
    return {
        "float32": np.float32(integers),
        "bfloat16": integers[..., 0].astype(jnp.bfloat16),
        "others": [np.int32(integers[..., 0, 0]), integers > 0, np.int8(integers[..., :0])],
    }


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), y)


def shifted(x, shift):
    """Returns what each rank receives: the rows of the rank `shift` positions before it."""
    return jax.tree.map(lambda rows: np.roll(rows, shift, axis=0), x)


def exchanged(x, out_chunk):
    """Moves each chunk by the definition of the map."""

    def move(chunks):
        result = np.zeros_like(chunks)
        for sender, receiver in np.ndindex(np.shape(out_chunk)):
            chunk = out_chunk[sender][receiver]
            if chunk >= 0:
                result[receiver, chunk] = chunks[sender, chunk]
        return result

    return jax.tree.map(move, x)


def num_chunks(out_chunk):
    return 1 + np.max(out_chunk)


def test_ring_exchange(implementation):
    """Any shift, any arrays in one call, on permuted devices."""
    x = draw(W)

    def local(x):
        return [
            ring_exchange(x, axis_name=AXIS, shift=shift, implementation=implementation)
            for shift in SHIFTS
        ]

    got = on_ranks(local, mesh_of(W, ORDER))(x)
    for shift, result in zip(SHIFTS, got, strict=True):
        assert_same(result, shifted(x, shift))


def test_chunk_exchange(implementation):
    """Slots that no rank fills are zero."""
    x = {name: draw(W, num_chunks(maps[0])) for name, maps in MAPS.items()}

    def local(x):
        options = {"axis_name": AXIS, "implementation": implementation}
        return {name: chunk_exchange(x[name], *maps, **options) for name, maps in MAPS.items()}

    got = on_ranks(local, mesh_of(W, ORDER))(x)
    for name, (out_chunk, _) in MAPS.items():
        assert_same(got[name], exchanged(x[name], out_chunk))


def test_transposes(implementation):
    """The transpose negates the shift or swaps the maps; <y, A x> = <A' y, x>, exactly."""
    out_chunk, in_chunk = MAPS["two cycles"]
    x = draw(W, 2)["float32"]
    y = np.float32(np.random.default_rng(1).integers(-9, 10, x.shape))

    def local(x, y):
        options = {"axis_name": AXIS, "implementation": implementation}
        ring = lambda x: ring_exchange(x, shift=2, **options)
        chunks = lambda x: chunk_exchange(x, out_chunk, in_chunk, **options)
        back = {
            "ring": ring_exchange(y, shift=-2, **options),
            "chunks": chunk_exchange(y, in_chunk, out_chunk, **options),
        }
        moved = {}
        for name, fn in {"ring": ring, "chunks": chunks}.items():
            moved[name], pull_back = jax.vjp(fn, x)
            pulled = pull_back(y)[0]
            back[name] = back[name], pulled, jax.linear_transpose(fn, x)(y)[0]
        return moved, back

    moved, back = on_ranks(local, mesh_of(W))(x, y)
    for name in ("ring", "chunks"):
        by_exchange, by_vjp, by_transpose = back[name]
        np.testing.assert_array_equal(by_vjp, by_exchange)
        np.testing.assert_array_equal(by_transpose, by_exchange)
        assert np.sum(moved[name] * y) == np.sum(by_vjp * x)


def test_axes_of_a_larger_mesh(implementation):
    """Along one axis, and along two axes as one, the major one first, on permuted devices."""
    x = np.arange(8 * 3, dtype=np.float32).reshape(2, 4, 3)
    cycles = two_level_cycles(4, 2)
    chunks = np.arange(8 * 4, dtype=np.float32).reshape(2, 4, 4)

    def local(x, chunks):
        options = {"implementation": implementation}
        inner = ring_exchange(x[0, 0], axis_name="b", **options)
        both = ring_exchange(x[0, 0], axis_name=("a", "b"), **options)
        maps = chunk_maps(cycles)
        moved = chunk_exchange(chunks[0, 0], *maps, axis_name=("a", "b"), **options)
        return jax.tree.map(lambda x: x[None, None], (inner, both, moved))

    fn = jax.shard_map(
        local,
        mesh=permuted_mesh((2, 4), ("a", "b")),
        in_specs=P("a", "b"),
        out_specs=P("a", "b"),
        check_vma=implementation == "xla",
    )
    inner, both, moved = jax.jit(fn)(x, chunks)
    np.testing.assert_array_equal(inner, np.roll(x, 1, axis=1))
    np.testing.assert_array_equal(both, np.roll(x.reshape(8, 3), 1, axis=0).reshape(x.shape))
    want = exchanged(chunks.reshape(8, 4), chunk_maps(cycles)[0]).reshape(chunks.shape)
    np.testing.assert_array_equal(moved, want)


# ---- Compiled collectives.


def collectives(lowered):
    """Returns the exchanges of the compiled program, in order."""
    kind = re.compile(r" = .*? (collective-permute|all-gather|all-to-all|custom-call)(?:-start)?\(")
    return kind.findall(lowered.compile().as_text())


def test_all_arrays_move_in_one_exchange():
    x = draw(W, 4)
    maps = MAPS["all links"]
    program = on_ranks(
        lambda x: (ring_exchange(x, axis_name=AXIS), chunk_exchange(x, *maps, axis_name=AXIS)),
        mesh_of(W),
    ).lower(x)
    assert collectives(program) == ["custom-call"] * 2


# ---- Invalid calls.

GOOD = MAPS["all links"]


def exchange(maps, chunks=4, **options):
    x = np.zeros((W, chunks, 2), np.float32)
    on_ranks(lambda x: chunk_exchange(x, *maps, axis_name=AXIS, **options), mesh_of(W))(x)


def ring(**options):
    x = np.zeros((W, 2), np.float32)
    on_ranks(lambda x: ring_exchange(x, axis_name=AXIS, **options), mesh_of(W))(x)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: ring(implementation="a"), "ring_exchange: implementation is 'a'; it needs"),
        (lambda: exchange(GOOD, implementation="a"), "chunk_exchange: implementation is 'a'; it"),
        (lambda: exchange(GOOD, chunks=3), r"shape \(3, 2\) but the maps name 4 chunks"),
        (lambda: exchange((GOOD[0],) * 2), r"chunk_exchange: .* must be each other's transpose"),
        (lambda: exchange(chunk_maps([[0, 1, 2]])), "chunk_exchange: out_chunk has rows of length"),
    ],
)
def test_rejected(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("is_set", [True, False], ids=["set_mesh", "no mesh"])
def test_outside_shard_map(is_set):
    maps = [[-1, 0], [0, -1]], [[-1, 0], [0, -1]]
    calls = {
        "ring_exchange": ring_exchange,
        "chunk_exchange": lambda x, **at: chunk_exchange(x, *maps, **at),
    }
    for op, call in calls.items():
        says = f"^{op}: axis_name 'cp' is not manual here.*inside jax.shard_map over 'cp'.*use disp"
        where = jax.set_mesh(mesh_of(2)) if is_set else contextlib.nullcontext()
        with where, pytest.raises(ValueError, match=says):
            jax.jit(partial(call, axis_name=AXIS))(np.ones((2, 3), np.float32))
