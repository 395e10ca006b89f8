"""What a call cannot use is an error: tokens in another order, arguments of other libraries."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from argument_table import PAGE, page, table
from hypothesis import given, settings, strategies as st
from in_ci import in_ci
from jax.sharding import PartitionSpec as P
from jaxprs import runs
from on_mesh import AXIS, all_fail, mesh_of

import jax_cp_dispatch as cpd
from jax_cp_dispatch.documents import zigzag_permutation
from jax_cp_dispatch.masks import Blocks, Tree

ALGORITHMS = ("zigzag", "ulysses", "balanced")  # rotating keys, tokens for heads, by a plan
T = 64
LENGTHS = [33, 10, 17, 4]  # the last ones are padding
IDS = np.repeat([1, 2, 3, 0], LENGTHS)[None].astype(np.int32)
POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS])[None].astype(np.int32)
ONE, ASCENDING = np.ones((1, T), np.int32), np.arange(T, dtype=np.int32)[None]
ZIGZAG = zigzag_permutation(T, 8)
PLACEMENT = cpd.place_tokens(segment_ids=IDS, positions=POSITIONS, world_size=8)
Q = np.random.default_rng(0).normal(size=(1, T, 8, 4)).astype(np.float32)


def attention(algorithm, num_ranks=8, *, is_zigzag=False) -> Any:
    """Returns a compiled function of traced ids and positions."""

    @jax.jit
    def attend(segment_ids, positions):
        documents = cpd.Documents(segment_ids, positions)
        return cpd.context_parallel_attention(
            *(Q, Q, Q), mesh=mesh_of(num_ranks), axis_name=AXIS, algorithm=algorithm,
            batch_axis=(), head_axis=(),
            documents=documents.zigzag(num_ranks) if is_zigzag else documents,
        )  # fmt: skip

    return attend


WRONG = {
    "placed order": (PLACEMENT.apply(IDS), PLACEMENT.apply(POSITIONS)),
    "zigzag order": (IDS[:, ZIGZAG], POSITIONS[:, ZIGZAG]),
    "zigzag order of one document": (ONE, ASCENDING[:, ZIGZAG]),
}


@pytest.mark.parametrize("algorithm", ["zigzag", cpd.Balanced(cpd.PlanConfig(8, kv_capacity=40))])
def test_tokens_in_another_order_are_an_error_on_all_ranks(algorithm):
    """So are documents that exceed a capacity, of a plan inside the program."""
    attend = attention(algorithm)
    assert np.isfinite(attend(IDS, POSITIONS)).all()
    for segment_ids, positions in WRONG.values():
        all_fail(
            attend(segment_ids, positions),
            "a document has several pieces in its batch row.* SharedPrefix and Tree.* omit pos",
        )
    if algorithm == "zigzag":
        assert np.isfinite(attend(ONE, ASCENDING)).all()
    else:
        says = r"would receive \d+ tokens but PlanConfig.kv_capacity is 40. Pass PlanConfig.kv_capa"
        all_fail(attend(ONE, ASCENDING), says)
    segment_ids, positions = WRONG["placed order"]
    with pytest.raises(ValueError, match="segment 1 occurs in separate runs of batch row 0"):
        cpd.context_parallel_attention(
            *(Q, Q, Q), mesh=mesh_of(8), axis_name=AXIS, algorithm=algorithm,
            segment_ids=segment_ids, positions=positions,
        )  # fmt: skip


def test_documents_that_were_reordered_twice():
    """Traced ids in zigzag order, which were said to be packed, and put into zigzag order."""
    attend = attention("ulysses", is_zigzag=True)
    for segment_ids, positions in ((IDS, POSITIONS), (ONE, ASCENDING)):
        assert np.isfinite(attend(segment_ids, positions)).all()
        again = attend(segment_ids[:, ZIGZAG], positions[:, ZIGZAG])
        all_fail(again, "a document has several pieces in its batch row")


def test_nan_without_a_transport_of_errors():
    """On one rank; by XLA's collectives: test_attention_plans.py."""
    attend = attention("ring", 1)
    assert np.isfinite(attend(IDS, POSITIONS)).all()
    assert np.isnan(attend(*WRONG["placed order"])).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_check_adds_no_exchange(algorithm):
    """Ids known on the host are checked there: the program has the same exchanges."""
    call = attention(algorithm)
    traced = runs(jax.make_jaxpr(call)(IDS, POSITIONS).jaxpr)
    known = runs(jax.make_jaxpr(lambda: call.__wrapped__(IDS, POSITIONS))().jaxpr)
    extra = 1 if algorithm == "balanced" else 0  # it gathers the ids, to plan inside the program
    assert traced["dispatch"] == known["dispatch"] + extra
    assert traced["combine"] == known["combine"]


def test_the_mask_of_other_columns_fails_on_all_ranks():
    """In packed order for zigzag tokens; of one rank's columns; against the rules of its kind."""
    mesh, q = mesh_of(4), np.ones((1, T, 1, 4), np.float32)
    ids = np.repeat([[1, 2, 3]], [30, 20, 14], axis=1)
    blocks = np.repeat([[0, 1, 0, 2, 0]], [20, 13, 7, 10, 14], axis=1)
    says = "the mask is not one of these tokens and documents"

    attend = partial(cpd.context_parallel_attention, axis_name=AXIS, algorithm="ring")
    of_all = partial(attend, q, q, q, mesh=mesh)
    of_tree = jax.jit(lambda spans, parents: of_all(segment_ids=ids, mask=Tree(spans, parents)))
    spans = np.repeat([[0, 1, 2, 3]], [30, 10, 10, 14], axis=1)
    assert np.isfinite(of_tree(spans, np.array([[-1, -1, 1, -1]]))).all()
    all_fail(of_tree(spans, np.array([[-1, 2, -1, -1]])), says)  # a child before its parent

    stored = jax.jit(lambda ids, mask: of_all(documents=cpd.Documents(ids).zigzag(4), mask=mask))
    packed = Blocks(blocks)
    mask = cpd.Documents(ids).zigzag(4).apply(packed)
    assert np.isfinite(stored(ids, mask)).all()
    said = jax.tree.unflatten(jax.tree.structure(mask), jax.tree.leaves(packed))
    all_fail(stored(ids, said), says)
    with pytest.raises(ValueError, match=r"mask=.* in packed order, but the tokens in zigzag"):
        stored(ids, packed)

    spec = P(None, AXIS)
    of_rank = lambda q, ids, blocks: attend(q, q, q, segment_ids=ids, mask=Blocks(blocks))
    on_ranks = jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    all_fail(jax.jit(on_ranks)(q, ids, blocks), says)


@jax.jit
def shifted(segment_ids, positions):
    """Returns rows of one rank: NaN without a transport of errors."""
    rows = jnp.zeros((*segment_ids.shape, 1))
    documents = cpd.Documents(segment_ids, positions)
    return cpd.sequence.shift(rows, 1, documents=documents, mesh=mesh_of(1), axis_name=AXIS)


def is_accepted(segment_ids, positions):
    return not np.isnan(shifted(segment_ids, positions)).any()


@st.composite
def packed_rows(draw):
    """Ids and positions of documents in order; ids may repeat, first documents may be cropped."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    lengths.append(48 - sum(lengths))
    ids = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    columns = np.repeat(ids, lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    return columns, positions


@settings(deadline=None)
@given(packed_rows(), st.booleans(), st.randoms(use_true_random=False))
def test_the_program_and_the_host_agree(row, with_positions, random):
    """For documents in order, and for any shuffle of their tokens."""
    ids, positions = row
    if random.random() < 0.7:
        order = sorted(range(len(ids)), key=lambda _: random.random())
        cut = random.randrange(len(ids))
        order = order if random.random() < 0.3 else [*range(cut, len(ids)), *range(cut)]
        ids, positions = ids[order], positions[order]
    ids, positions = (x[None].astype(np.int32) for x in (ids, positions))  # [1, 48]
    places = positions if with_positions else None
    try:
        cpd.Documents(ids, places)
        accepted = True
    except ValueError:
        accepted = False
    assert is_accepted(ids, places) == accepted


@pytest.mark.parametrize(
    "ids, positions, accepted",
    [
        ([1, 1, 2, 1], None, False),
        ([1, 1, 0, 1], None, False),
        ([5, 5, 2, 2], None, True),  # ids in any order
        ([1, 1, 2, 1], [0, 1, 0, 0], True),  # positions start again: another document
        ([1, 1, 2, 1], [0, 1, 0, 2], False),
        ([1, 1, 2, 1], [1, 2, 0, 0], False),  # the tail of a document before its head
        ([1, 1, 1, 1], [7, 8, 0, 1], True),  # a row that begins inside a document
        ([1, 1, 1, 1], [2, 3, 0, 1], True),  # likewise: nothing lies between
        ([1, 1, 1, 1], [0, 2, 1, 3], False),
        ([0, 0, 0, 0], [3, 1, 3, 2], True),  # padding
    ],
)
def test_what_counts_as_in_order(ids, positions, accepted):
    ids = np.array([ids], np.int32)
    assert is_accepted(ids, positions and np.array([positions], np.int32)) == accepted


@in_ci
@pytest.mark.usefixtures("unchecked_types")
def test_the_table_of_arguments_is_what_happens():
    """Whatever an algorithm does not take is refused in words, with the name of the function."""
    shown, errors = table()
    assert PAGE.read_text() == page(shown), "run python tests/support/argument_table.py"
    for error in errors:
        assert error.startswith(("context_parallel_attention: ", "place_tokens: ")), error
        assert re.search(r"[Pp]ass|[Cc]hoose|use|Pad|Call", error), error
