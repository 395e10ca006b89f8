"""ring_exchange and chunk_exchange: values, transposes, errors, and one call for all arrays.

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
RING = [0, 1, 2, 3, 4]
GOOD = chunk_maps(hamiltonian_cycles(W))  # of all links, in 4 chunks
TWO_CYCLES = chunk_maps([RING, RING[::-1]])  # leave some links without a chunk
implementations = pytest.mark.parametrize("implementation", ["in_process", "xla"])


def draw(seed):
    """Returns small integers of all ranks, in arrays of several dtypes and dimensions."""
    integers = np.random.default_rng(seed).integers(-9, 10, (W, 4, 2, 3))
    return {
        "float32": np.float32(integers),
        "bfloat16": integers[..., 0].astype(jnp.bfloat16),
        "others": [np.int32(integers[..., 0, 0]), integers > 0, np.int8(integers[..., :0])],
    }


def exchanged(chunks, out_chunk):
    """Moves each chunk by the definition of the map; slots that no rank fills are zero."""
    result = np.zeros_like(chunks)
    for sender, receiver in np.ndindex(np.shape(out_chunk)):
        chunk = out_chunk[sender][receiver]
        if chunk >= 0:
            result[receiver, chunk] = chunks[sender, chunk]
    return result


def first(arrays, num):
    """Returns the first chunks of a rank."""
    return jax.tree.map(lambda x: x[:num], arrays)


def exchanges(**options):
    """Yields each exchange with its transpose, its definition, and how many chunks it takes."""
    ring = partial(ring_exchange, axis_name=AXIS, **options)
    for shift in (1, -1, 0, 3, 7, -12):
        definition = partial(np.roll, shift=shift, axis=0)
        yield partial(ring, shift=shift), partial(ring, shift=-shift), definition, 4
    for (out_chunk, in_chunk), num_chunks in ((GOOD, 4), (TWO_CYCLES, 2)):
        chunks = partial(chunk_exchange, axis_name=AXIS, **options)
        move = partial(chunks, out_chunk=out_chunk, in_chunk=in_chunk)
        back = partial(chunks, out_chunk=in_chunk, in_chunk=out_chunk)
        yield move, back, partial(exchanged, out_chunk=out_chunk), num_chunks


@implementations
def test_values_and_transposes(implementation):
    """Any arrays in one call, on permuted devices; <y, A x> = <A' y, x>, exactly."""
    x, y = draw(0), draw(1)
    cases = list(exchanges(implementation=implementation))

    def local(x, y):
        results = []
        for move, back, _, num_chunks in cases:
            some, g = first((x, y["float32"]), num_chunks)
            by_vjp = jax.vjp(move, some["float32"])[1](g)
            by_transpose = jax.linear_transpose(move, some["float32"])(g)
            results.append((move(some), back(g), *by_vjp, *by_transpose))
        return results

    got = on_ranks(local, mesh_of(W, [2, 0, 4, 3, 1]))(x, y)
    for (_, _, definition, num_chunks), (moved, *backs) in zip(cases, got, strict=True):
        some, g = jax.vmap(partial(first, num=num_chunks))((x, y["float32"]))
        want = jax.tree.map(definition, some)
        assert jax.tree.map(lambda a: a.dtype, moved) == jax.tree.map(lambda a: a.dtype, want)
        jax.tree.map(np.testing.assert_array_equal, moved, want)
        for back in backs:
            np.testing.assert_array_equal(back, backs[0])
        assert np.sum(moved["float32"] * g) == np.sum(backs[0] * some["float32"])


@implementations
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


def test_all_arrays_move_in_one_exchange():
    move = lambda x: (ring_exchange(x, axis_name=AXIS), chunk_exchange(x, *GOOD, axis_name=AXIS))
    text = on_ranks(move, mesh_of(W)).lower(draw(0)).as_text()
    found = re.findall(r"@jax_cp_dispatch\.\w+|stablehlo\.(?:all|collective|reduce_s)\w+", text)
    assert found == ["@jax_cp_dispatch.dispatch"] * 2


# ---- Invalid calls.


def exchange(maps, chunks=4, **options):
    x = np.zeros((W, chunks, 2), np.float32)
    on_ranks(lambda x: chunk_exchange(x, *maps, axis_name=AXIS, **options), mesh_of(W))(x)


def ring(**options):
    x = np.zeros((W, 2), np.float32)
    on_ranks(lambda x: ring_exchange(x, axis_name=AXIS, **options), mesh_of(W))(x)


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
