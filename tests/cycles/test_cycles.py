"""Cycles over ranks: each uses every link once and visits every rank; custom ones are checked."""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from on_mesh import AXIS, mesh_of
from properties import examples

from jax_cp_dispatch import Documents, Hamilton, context_parallel_attention, merge_partials
from jax_cp_dispatch.cycles import (
    chunk_maps,
    hamiltonian_cycles,
    hamiltonian_paths,
    source_is_earlier,
    two_level_cycles,
    two_level_maps,
)
from jax_cp_dispatch.documents import zigzag_permutation

DECOMPOSABLE = [n for n in range(2, 65) if n not in (4, 6)]
NODES = [(m, u) for m in range(1, 13) for u in range(1, 7) if u > 1 or m not in (4, 6)]


def arcs(rows, *, closed=True):
    """Returns all links `(tail, head)`, in row order."""
    rows = np.asarray(rows)
    tails, heads = (rows, np.roll(rows, -1, 1)) if closed else (rows[:, :-1], rows[:, 1:])
    return np.stack([tails.ravel(), heads.ravel()], axis=1)


def assert_each_link_once(pairs, num_ranks):
    used = np.zeros((num_ranks, num_ranks), int)
    np.add.at(used, tuple(pairs.T), 1)
    np.testing.assert_array_equal(used, 1 - np.eye(num_ranks, dtype=int))


def assert_permutations(rows, num_ranks):
    np.testing.assert_array_equal(
        np.sort(rows, axis=1), np.broadcast_to(np.arange(num_ranks), np.shape(rows))
    )


def travel(rows, out_chunk):
    """Returns owners `[step][rank][chunk]`, by moving chunks over the links of `out_chunk`."""
    out_chunk = np.asarray(out_chunk)
    num_ranks, num_chunks = len(out_chunk), len(rows)
    held = np.repeat(np.arange(num_ranks)[:, None], num_chunks, axis=1)
    steps = [held]
    for _ in range(num_ranks - 1):
        arriving = np.full_like(held, -1)
        for sender, receiver in np.argwhere(out_chunk >= 0):
            chunk = out_chunk[sender, receiver]
            arriving[receiver, chunk] = held[sender, chunk]
        held = arriving
        steps.append(held)
    return np.array(steps)


def test_hamiltonian_cycles_use_each_link_once():
    for n in (*DECOMPOSABLE, 97, 126, 250, 333, 512):
        rows = np.array(hamiltonian_cycles(n))
        assert rows.shape == (n - 1, n)
        assert_permutations(rows, n)
        assert_each_link_once(arcs(rows), n)


def test_smallest_numbers_of_ranks():
    assert hamiltonian_cycles(1) == []
    assert hamiltonian_cycles(2) == [[0, 1]]
    assert hamiltonian_paths(1) == [[0]]
    assert source_is_earlier([]) == [[[]]]
    assert chunk_maps([]) == ([[-1]], [[-1]])
    for of_one in (Hamilton(cycles=[]), Hamilton(maps=([[-1]], [[-1]]))):
        assert of_one.schedule("a test", 1) == Hamilton().schedule("a test", 1)


def test_hamiltonian_paths_use_each_link_once():
    for m in (m for m in range(1, 65) if m not in (3, 5)):
        paths = hamiltonian_paths(m)
        assert np.shape(paths) == (m, m)
        assert_permutations(paths, m)
        assert_each_link_once(arcs(paths, closed=False), m)
        np.testing.assert_array_equal([path[0] for path in paths], np.arange(m))
        ends = [path[-1] for path in paths]
        assert sorted(ends) == list(range(m))
        if m % 2 == 0:
            np.testing.assert_array_equal(ends, (np.arange(m) + m // 2) % m)


def test_chunks_that_follow_the_maps_visit_every_rank_once():
    of_flat = [hamiltonian_cycles(n) for n in DECOMPOSABLE if n <= 24]
    of_nodes = [two_level_cycles(m, u) for m, u in NODES if 1 < m * u <= 24]
    for rows in of_flat + of_nodes:
        num_ranks = len(rows[0])
        out_chunk, in_chunk = chunk_maps(rows)
        np.testing.assert_array_equal(in_chunk, np.transpose(out_chunk))
        sources = travel(rows, out_chunk)
        assert_permutations(sources.reshape(num_ranks, -1).T, num_ranks)
        rank = np.arange(num_ranks)[:, None, None]
        np.testing.assert_array_equal(source_is_earlier(rows), sources.swapaxes(0, 1) <= rank)


@pytest.mark.parametrize("rail_aligned", [False, True])
def test_two_level_cycles_use_each_link_inside_once_and_one_between(rail_aligned):
    for m, u in NODES:
        if rail_aligned and (m % 2 or u % 2):
            continue
        n = m * u
        maps = two_level_maps(m, u, rail_aligned=rail_aligned)
        assert maps.cycles == two_level_cycles(m, u, rail_aligned=rail_aligned)
        if u == 1:
            assert maps.cycles == hamiltonian_cycles(m)
            assert maps.inter_out == maps.inter_in == [[-1, -1]] * m
            continue
        assert len(maps.cycles) == (m - 1 if m in (3, 5) else m)
        assert_permutations(maps.cycles, n)
        links = arcs(maps.cycles)
        inside = links[:, 0] // m == links[:, 1] // m
        between = links[~inside]
        np.testing.assert_array_equal((between[:, 0] // m + 1) % u, between[:, 1] // m)
        for side in between.T:  # the last ranks of nodes of size 3 or 5 have none
            connected = [r for r in range(n) if m not in (3, 5) or r % m < m - 1]
            assert sorted(side) == connected
        for node in range(u):
            within = links[inside & (links[:, 0] // m == node)] - node * m
            if m in (3, 5):
                assert len(np.unique(within, axis=0)) == len(within) == (m - 1) ** 2
            else:
                assert_each_link_once(within, m)
        if rail_aligned:
            np.testing.assert_array_equal(between[:, 0] % m, between[:, 1] % m)

        out_chunk = np.array(maps.out_chunk)
        np.testing.assert_array_equal(maps.in_chunk, out_chunk.T)
        assert (out_chunk >= 0).sum() == len(links)
        for rank, (peer, chunk) in enumerate(maps.inter_out):
            if peer >= 0:
                assert out_chunk[rank, peer] == chunk
                assert maps.inter_in[peer] == [rank, chunk]
        assert sum(peer >= 0 for peer, _ in maps.inter_in) == len(between)


def test_the_direct_schedule_uses_each_link_once_per_step():
    for n in (2, 5, 8):
        schedule = Hamilton(cycles="direct").schedule("a test", n)
        held = [[schedule.held(rank, step) for rank in range(n)] for step in range(n)]
        source, chunk = np.moveaxis(np.array(held), 2, 0)  # each [step, rank, slot]
        seen = np.sort((source * n + chunk).swapaxes(0, 1).reshape(n, -1), axis=1)  # of each rank
        every_chunk = (np.arange(n)[:, None] * n + np.arange(n - 1)).ravel()
        np.testing.assert_array_equal(seen, np.broadcast_to(every_chunk, seen.shape))
        others = np.delete(np.tile(np.arange(n), (n, 1)), np.arange(n) * (n + 1))
        for step in source[1:]:
            np.testing.assert_array_equal(np.sort(step, axis=1), others.reshape(n, n - 1))


def test_sizes_without_cycles_are_rejected_with_a_remedy(unchecked_types):
    for n in (4, 6):
        with pytest.raises(ValueError, match=rf"n is {n}.*Tillson 1980.*Omit cycles of"):
            hamiltonian_cycles(n)
        with pytest.raises(ValueError, match="Tillson"):
            two_level_maps(n, 1)
    for m in (3, 5):
        with pytest.raises(ValueError, match=rf"m is {m}.*two_level_cycles\({m}, ...\)"):
            hamiltonian_paths(m)
    for m, u in ((3, 2), (4, 3), (2, 1)):
        with pytest.raises(ValueError, match=rf"rail_aligned needs .*got m={m}, u={u}"):
            two_level_cycles(m, u, rail_aligned=True)
    with pytest.raises(ValueError, match="hamiltonian_cycles: n is 0; it needs to be at least 1"):
        hamiltonian_cycles(0)
    with pytest.raises(TypeError, match=r"hamiltonian_cycles: n is 2\.0; it needs to be"):
        hamiltonian_cycles(2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="two_level_cycles: u is True"):
        two_level_cycles(2, True)


# Changes of cycles of three ranks and of their maps, and what the error says.
TWO = [[0, 1, 2], [0, 2, 1]]
NOT_CYCLES: list[tuple[Any, str]] = [
    ([[0, 1, 2], [0, 1]], r"row 1 of cycles is \[0, 1\], .* not a permutation"),
    ([[0, 1, 1]], r"row 0 of cycles is \[0, 1, 1\].*each of the 3 ranks once"),
    ([[-1, 0, 1]], "not a permutation"),
    ([[0, 1, 2], [1, 2, 0]], "rows 0 and 1 .* from rank 0 to rank 1"),
    ([], "got 0 cycles for 3 ranks"),
    ([[0, True, 2]], "row 0 of cycles has entries of type bool"),
    (np.array([[0.0, 1.0, 2.0]]), "row 0 of cycles has entries of type float"),
    ([0, 1, 2], r"cycles is .*; it needs to be rows of"),
]
NOT_MAPS: list[tuple[str, Any, str]] = [
    ("out", lambda m: m[:2], r"out_chunk has rows of length \[3, 3\], but needs 3 rows of 3"),
    ("in", lambda m: [row[:2] for row in m], r"in_chunk has rows of length \[2, 2, 2\]"),
    ("out", lambda m: [[0, *m[0][1:]], *m[1:]], r"out_chunk\[0\] .* needs -1 at index"),
    ("in", lambda m: [[-1, -2, 0], *m[1:]], r"in_chunk\[0\] is \[-1, -2, 0\]"),
    ("out", lambda m: [[-1, 1, 1], *m[1:]], "rank 0 sends chunk 1 twice"),
    ("in", lambda m: [*m[:2], [0, 0, -1]], "rank 2 fills slot 0 twice"),
    ("in", lambda m: [[-1] * 3, *m[1:]], r"in_chunk\[0\]\[1\] is -1.* transpose"),
    ("out", lambda m: [[-1, 1, 0], *m[1:]], r"out_chunk\[0\]\[1\] is 1 but in_chunk\[1\]"),
]


@pytest.mark.usefixtures("unchecked_types")
def test_invalid_cycles_and_maps_are_rejected():
    for cycles, says in NOT_CYCLES:
        with pytest.raises((ValueError, TypeError), match=f"^a test: .*{says}"):
            Hamilton(cycles=cycles).schedule("a test", 3)
    for name, change, says in NOT_MAPS:
        maps: Any = dict(zip(("out", "in"), chunk_maps(TWO), strict=True))
        maps[name] = change(maps[name])
        with pytest.raises(ValueError, match=f"^a test: .*{says}"):
            Hamilton(maps=(maps["out"], maps["in"])).schedule("a test", 3)
    for op in (chunk_maps, source_is_earlier):
        with pytest.raises(ValueError, match=f"{op.__name__}: rows 0 and 1"):
            op([[0, 1, 2], [1, 2, 0]])
        with pytest.raises(ValueError, match=f"{op.__name__}: row 0 .* not a permutation"):
            op([[]])
    with pytest.raises(ValueError, match="got 1 cycles for 1 ranks"):
        chunk_maps([[0]])
    rows = hamiltonian_cycles(5)[:3]
    for each in (np.array(rows), np.array(rows, np.uint8)):
        assert chunk_maps(each) == chunk_maps(rows)


# ---- The order of tokens for which causal work is equal.


@given(num_ranks=st.integers(1, 40), per_rank=st.integers(0, 40))
@examples(15)
def test_zigzag_permutation_is_that_of_blocks(num_ranks, per_rank):
    num_tokens = num_ranks * per_rank
    order = zigzag_permutation(num_tokens, num_ranks)
    back = zigzag_permutation(num_tokens, num_ranks, inverse=True)
    np.testing.assert_array_equal(order[back], np.arange(num_tokens))
    first, last = (per_rank + 1) // 2, per_rank // 2
    lengths = [first] * num_ranks + [last] * num_ranks
    blocks = np.split(np.arange(num_tokens), np.cumsum(lengths)[:-1])
    want = [blocks[i] for rank in range(num_ranks) for i in (rank, 2 * num_ranks - 1 - rank)]
    np.testing.assert_array_equal(order, np.concatenate(want))


@pytest.mark.parametrize("num_tokens, num_ranks", [(7, 2), (4, 0), (-2, 2)])
def test_tokens_that_cannot_be_split_are_rejected(num_tokens, num_ranks):
    with pytest.raises(ValueError, match=f"{num_tokens} tokens cannot be split over {num_ranks}"):
        zigzag_permutation(num_tokens, num_ranks)


# ---- Recorded results of another implementation, of cycles and of attention; tests/data names it.

VECTORS = pathlib.Path(__file__).parents[1] / "data" / "hamilton"


def recorded(name):
    """Returns cycles, maps, placements or a merge, by the name of the function."""
    return json.loads((VECTORS / "schedules.json").read_text())[name]


def test_recorded_maps_and_sources():
    for num_ranks in (12, 16):
        Hamilton(cycles=recorded(f"gen_hamilton_circle_{num_ranks}")).schedule("a test", num_ranks)
    cycles = recorded("gen_hamilton_circle_8")
    out_chunk, in_chunk = chunk_maps(cycles)
    assert out_chunk == recorded("out_mapping_circle_8")
    assert in_chunk == recorded("in_mapping_circle_8")
    assert source_is_earlier(cycles) == recorded("source_rank_per_iter_8")
    # The records give each rank's position in each cycle: after that many steps, it holds the
    # chunk of the first rank.
    place = np.array(recorded("mask_index_circle_8"))
    rank, chunk = np.indices(place.shape)
    first = [row[0] for row in cycles]
    np.testing.assert_array_equal(
        travel(cycles, out_chunk)[place, rank, chunk], np.broadcast_to(first, place.shape)
    )


def test_recorded_two_nodes():
    maps = two_level_maps(8, 2)
    assert hamiltonian_paths(8) == recorded("gen_hamilton_path_local_8")
    assert maps.cycles == recorded("gen_hamilton_circle_two_nodes_16")
    assert {"inter_out": maps.inter_out, "inter_in": maps.inter_in} == recorded(
        "inter_node_mapping_16"
    )
    for node in (slice(0, 8), slice(8, 16)):
        inside = np.array(maps.out_chunk)[node, node], np.array(maps.in_chunk)[node, node]
        np.testing.assert_array_equal(inside[0], recorded("intra_node_out_mapping_8"))
        np.testing.assert_array_equal(inside[1], recorded("intra_node_in_mapping_8"))


def test_recorded_attention():
    vector = dict(np.load(VECTORS / "forward_zigzag_4.npz"))
    q, k, v, want = (vector[key] for key in ("q", "k", "v", "out_full"))
    documents = Documents(np.ones(q.shape[:2], np.int32)).zigzag(4)
    where = {"mesh": mesh_of(4), "axis_name": AXIS, "algorithm": "hamilton"}
    got = context_parallel_attention(*documents.apply((q, k, v)), documents=documents, **where)
    np.testing.assert_allclose(got, documents.apply(want), rtol=1e-5, atol=1e-5)
    for rank, part in enumerate(np.split(np.asarray(got), 4, axis=1)):
        np.testing.assert_allclose(part.ravel(), vector["local_out"][rank], rtol=1e-5, atol=1e-5)


def test_recorded_zigzag():
    for num_ranks in (4, 8):
        of_ranks = recorded(f"placement_zigzag_ring_{num_ranks}")
        of_ranks = of_ranks.get("ranks") or of_ranks
        want = [of_ranks[str(rank)] for rank in range(num_ranks)]
        order = zigzag_permutation(np.size(want), num_ranks)
        np.testing.assert_array_equal(order.reshape(num_ranks, -1), want)


def test_recorded_merge():
    vector = recorded("out_lse_merge")
    names = ("block_out1", "block_lse1_BNS", "block_out2", "block_lse2_BNS")
    out, lse = merge_partials(*(jnp.float32(vector[name]) for name in names))
    np.testing.assert_allclose(out, vector["out"], rtol=1e-6, atol=1e-6)
    want = np.moveaxis(np.array(vector["lse_BSN1"])[..., 0], 1, 2)
    np.testing.assert_allclose(lse, want, rtol=1e-6, atol=1e-6)
