"""Ring, zigzag, Hamilton and Ulysses attention equal dense attention, forward and backward.

To keep programs few, the cases cover pairs of option values, and every number of ranks up to 8.
`sweep_attention.py` runs many more.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of, permuted_mesh
from sequences import Case, check, draw, out_and_gradients, run

from jax_cp_dispatch import Hamilton
from jax_cp_dispatch.attention.rotating import sequence
from jax_cp_dispatch.attention.rotating.schedules import CycleSchedule, DirectSchedule
from jax_cp_dispatch.cycles import chunk_maps
from jax_cp_dispatch.masks import Chunked, SlidingWindow

MAPS = chunk_maps(((0, 1, 2), (2, 1, 0)))
# Ranks 0 and 1, and 2 and 3, exchange their chunk: it never reaches the others.
TWO_PAIRS = 2 * ([[-1, 0, -1, -1], [0, -1, -1, -1], [-1, -1, -1, 0], [-1, -1, 0, -1]],)
# If 2 * chunks does not divide the rows, blocks and chunks are uneven, some of them empty.
CASES = [
    Case("ring", 5, 6, mask=SlidingWindow(7), zigzag=True, heads=(3, 1), check_vma=False,
         dtype="bfloat16"),
    Case("ring", 2, 1, documents="positions", mask=SlidingWindow(2), batch=2, heads=(4, 2),
         implementation="xla"),
    Case("zigzag", 8, 6, documents="segments", mask="full", zigzag=True, heads=(4, 2),
         logit_soft_cap=2.0, check_vma=False, dtype="bfloat16"),
    Case("hamilton", 1, 5, documents="both"),
    Case("hamilton", 4, 6, mask="full", batch=2),  # direct: 4 ranks have no cycles
    Case("hamilton", 7, 4, documents="both", mask=SlidingWindow(9), batch=2, logit_soft_cap=2.0,
         check_vma=False, dtype="bfloat16"),
    Case("hamilton", 8, 3, documents="both", mask="full", zigzag=True, heads=(4, 2),
         implementation="xla"),
    Case("hamilton", 5, 5, cycles="direct", documents="both", zigzag=True, batch=2,
         heads=(3, 1), logit_soft_cap=2.0, implementation="xla", check_vma=False),
    Case("hamilton", 6, 7, nodes=3, documents="positions", mask="full", zigzag=True,
         logit_soft_cap=2.0, check_vma=False),
    Case("hamilton", 8, 13, nodes=2),
    Case("ring", 4, 7, documents="segments", mask=SlidingWindow(6, 3), batch=2, heads=(4, 2)),
    Case("zigzag", 3, 5, documents="both", mask=SlidingWindow(None, 2), zigzag=True),
    Case("hamilton", 5, 3, documents="segments", mask=SlidingWindow(3, 6), heads=(3, 1),
         logit_soft_cap=2.0),
    Case("hamilton", 2, 9, mask=SlidingWindow(5, None), implementation="xla"),
    Case("ring", 1, 6, documents="segments", mask=SlidingWindow(2, 1)),
    Case("ring", 3, 7, documents="segments", mask=Chunked(4), batch=2, heads=(4, 2)),
    Case("zigzag", 8, 5, documents="both", mask=Chunked(7), zigzag=True),
    Case("hamilton", 3, 8, documents="positions", mask=Chunked(3), implementation="xla"),
    Case("zigzag", 1, 9, documents="segments", mask=Chunked(2)),
    Case("hamilton", 5, 4, maps=chunk_maps(((0, 2, 4, 1, 3), (0, 1, 2, 3, 4))),
         documents="segments"),
    Case("ulysses", 8, 6, documents="both", mask=SlidingWindow(9), heads=(16, 2), batch=2),
    Case("ulysses", 4, 5, documents="segments", mask="full", zigzag=True, heads=(4, 4),
         logit_soft_cap=2.0, check_vma=False, dtype="bfloat16"),
    Case("ulysses", 2, 1, documents="positions", heads=(4, 1), implementation="xla"),
    Case("ulysses", 1, 5, mask=Chunked(3)),
    Case("ulysses", 3, 7, mask=SlidingWindow(6, 3), heads=(6, 3),
         implementation="xla", documents="segments"),
    Case("hamilton", 5, 2, cycles=((0, 1, 2, 3, 4), (4, 3, 2, 1, 0)), documents="segments",
         batch=2, heads=(4, 2), logit_soft_cap=2.0, check_vma=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ring_zigzag_hamilton_and_ulysses_attention_equal_dense_attention(case):
    """On permuted devices; NaN in padding rows reaches no result."""
    operands = draw(case)
    order = np.random.default_rng(0).permutation(case.num_ranks)
    got = check(case, operands, out_and_gradients(case, mesh_of(case.num_ranks, order)))
    if operands[4] is not None:
        for result in got:
            assert not result[operands[4] == 0].any()


@pytest.mark.parametrize(
    "case",
    [
        Case("hamilton", 3, 26, documents="both", mask=SlidingWindow(30), batch=2, heads=(4, 2)),
        Case("hamilton", 4, 21, documents="segments", mask="full", zigzag=True, heads=(4, 1)),
        Case("zigzag", 4, 27, documents="segments", check_vma=False),
    ],
    ids=str,
)
def test_many_blocks(case, monkeypatch):
    """As with many rows: several blocks of queries and keys, the last ones padded."""
    blocks = {"block_q": 8, "block_kv": 8}
    monkeypatch.setattr(sequence, "rank_blocks", lambda *_, **__: blocks)
    check(case, draw(case))


@pytest.mark.parametrize("cycles", [None, "direct"])
def test_float64(cycles):
    case = Case("hamilton", 3, 5, cycles=cycles, documents="segments", dtype="float64")
    with jax.enable_x64(True):
        check(case, draw(case))


def test_one_program_serves_all_batches_and_repeats_bit_for_bit():
    """The documents of a batch are data: a new batch causes no new trace."""
    case = Case("hamilton", 3, 8, documents="segments", zigzag=True)
    program = out_and_gradients(case)
    operands = [draw(case, seed) for seed in range(4)]
    operands[1][4][:] = 0  # all padding
    operands[2][4][:] = np.arange(1, 25)  # documents of one token
    operands[3][4][:] = 1
    results = [check(case, each, program) for each in operands]
    assert not any(x.any() for x in results[1])
    for first, second in zip(results[0], run(case, operands[0], program), strict=True):
        np.testing.assert_array_equal(first, second)
    assert program._cache_size() == 1


def test_one_axis_of_a_larger_mesh():
    """The batch is sharded over the other axis."""
    options = {"scale": 0.3, "implementation": "xla"}
    case = Case("zigzag", 4, 5, documents="segments", batch=2, **options)
    mesh = permuted_mesh((2, 4), ("data", AXIS))
    check(case, draw(case), out_and_gradients(case, mesh, batch_axis="data"))


def test_scan_over_layers_with_remat():
    """As in a model: gradients through a scanned, rematerialised stack."""
    case = Case("hamilton", 3, 4)
    q, k, v, *_ = draw(case)
    v = np.concatenate([v, v], axis=-1)  # as wide as q, so that layers stack
    rows = P(None, AXIS)
    attend = jax.shard_map(case.function, mesh=mesh_of(3), in_specs=(rows,) * 3, out_specs=rows)

    def softmax(q, k, v):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(np.tri(q.shape[1], dtype=bool), logits, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    def loss(attend, q, layers):
        @jax.checkpoint
        def layer(x, w):
            return x + attend(x * w, k, v), None

        return jnp.sum(jax.lax.scan(layer, q, layers)[0] ** 2)

    layers = np.linspace(0.5, 1.5, 3).astype(np.float32)
    gradients = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    for x, y in zip(gradients(attend, q, layers), gradients(softmax, q, layers), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_no_tokens():
    case = Case("hamilton", 3, 0)
    for result in out_and_gradients(case)(*draw(case)):
        assert result.size == 0 and result.shape[:2] == (1, 0)


def test_custom_cycles_may_be_an_array():
    rows = [[2, 1, 0], [0, 1, 2]]
    array, lists = (Hamilton(cycles=cycles) for cycles in (np.array(rows), rows))
    assert array == lists and hash(array) == hash(lists)
    assert array.schedule("a test", 3) == CycleSchedule(((2, 1, 0), (0, 1, 2)))


def test_the_direct_schedule_uses_each_link_once_per_step():
    for n in range(2, 13):
        schedule = DirectSchedule(n)
        held = [[schedule.held(rank, step) for rank in range(n)] for step in range(n)]
        source, chunk = np.moveaxis(np.array(held), 2, 0)  # each [step, rank, slot]
        seen = np.sort((source * n + chunk).swapaxes(0, 1).reshape(n, -1), axis=1)  # of each rank
        every_chunk = (np.arange(n)[:, None] * n + np.arange(n - 1)).ravel()
        np.testing.assert_array_equal(seen, np.broadcast_to(every_chunk, seen.shape))
        others = np.delete(np.tile(np.arange(n), (n, 1)), np.arange(n) * (n + 1))
        for step in source[1:]:
            np.testing.assert_array_equal(np.sort(step, axis=1), others.reshape(n, n - 1))


# ---- Invalid calls.

SMALL = Case("hamilton", 3, 4, documents="both")
ONE_LINK_TWICE = r"rows 0 and 1 of cycles both go from rank 0 to rank 1"


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "algorithm, options, message",
    [
        ("hamilton", {"nodes": 0}, "nodes is 0 but there are 3 ranks"),
        ("hamilton", {"nodes": 3, "cycles": "direct"}, "got both nodes and cycles"),
        ("hamilton", {"cycles": "scenic"}, "cycles is 'scenic'; it needs to be rows of ranks"),
        (
            "hamilton",
            {"cycles": ((0, 1),)},
            r"row 0 of cycles is \[0, 1\], which is not a permutation",
        ),
        ("hamilton", {"cycles": ((0, 1, 2), (1, 2, 0))}, ONE_LINK_TWICE),
        ("hamilton", {"cycles": ()}, "got 0 cycles for 3 ranks"),
        ("hamilton", {"maps": MAPS, "cycles": "direct"}, "got both cycles and maps"),
        ("hamilton", {"maps": (MAPS[0], MAPS[0])}, "must be each other's transpose"),
        ("hamilton", {"maps": MAPS[:1]}, r"it needs to be \(out_chunk, in_chunk\)"),
        (
            "hamilton",
            {"num_ranks": 4, "maps": TWO_PAIRS},
            r"chunk 0 goes from rank 0 along \[0, 1\] and returns there too early",
        ),
        ("hamilton", {"num_ranks": 1, "cycles": ((0, 1),)}, "cycles"),
        ("ring", {"mask": np.tri(12, dtype=bool)}, r"mask is an array of shape \[12, 12\]"),
    ],
)
def test_invalid_options_are_rejected(algorithm, options, message):
    case = dataclasses.replace(SMALL, algorithm=algorithm, **options)
    with pytest.raises((ValueError, TypeError), match=message):
        out_and_gradients(case)(*draw(SMALL))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "place, change, error, message",
    [
        (0, lambda q: q[:, :, 0], ValueError, r"shapes \(1, 4, 8\).* need \[B, T, heads, features"),
        (1, lambda k: k[:, ::2], ValueError, "equal B and T.*, use local_attention"),
        (1, lambda k: k[..., :3], ValueError, "context_parallel_attention: "),
        (1, lambda k: k.astype(jnp.bfloat16), TypeError, "context_parallel_attention: "),
        (0, lambda q: q[:, :, [0, 0, 0]], ValueError, "N must be a multiple of K"),
        (0, lambda q: q[:, :, :1], ValueError, "1 query heads cannot share 2 KV heads"),
        (4, lambda ids: ids.astype(np.float32), TypeError, "segment_ids has dtype float32"),
        (5, lambda at: at[:, ::2], ValueError, r"positions has shape \(1, 2\) but q has B, T = "),
    ],
)
def test_invalid_operands_are_rejected(place, change, error, message):
    operands = list(draw(SMALL))
    operands[place] = change(operands[place])
    with pytest.raises(error, match=message):
        out_and_gradients(SMALL)(*operands)
