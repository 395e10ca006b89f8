"""`check_tokens` finds arrays in another order than their documents, or of another batch."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, permuted_mesh
from orders import packed

from jax_cp_dispatch import Documents, place_tokens, sequence

MESH = permuted_mesh((2, 4), ("data", AXIS))
IDS = packed([[9, 20, -3], [30, 2], [16, 16], [1, 1, 30]])
OTHER_IDS = packed([[7, 22, -3], [30, 2], [16, 16], [1, 1, 30]])
OF_ROWS = {"axis_name": AXIS, "mesh": MESH, "batch_axis": "data"}


def draw(ids, seed):
    """Arrays in packed order, as a loader has them, their documents, checksums and placement."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2**40, ids.shape)
    arrays = {"labels": np.roll(tokens, -1, 1) % 1000 - 1, "tokens": tokens % 1000}
    arrays |= {"weights": rng.random((*ids.shape, 2))}
    documents = Documents(ids)
    placement = place_tokens(segment_ids=ids, world_size=4, num_groups=2)
    checksums = sequence.token_checksums(arrays, documents=documents)
    return SimpleNamespace(**locals())


THIS, NEXT = draw(IDS, 1), draw(OTHER_IDS, 2)
PLACED = THIS.placement.apply(THIS.arrays)


@partial(jax.jit, static_argnames="implementation")
def check(arrays, checksums, documents, implementation=None):
    given = {"documents": documents, "implementation": implementation, **OF_ROWS}
    return sequence.check_tokens(arrays, checksums, **given)


def seen(name, arrays, of=PLACED):
    """The arrays of a batch, one of them exchanged."""
    return {**of, name: arrays[name]}


OTHER_ORDER = "array {} has the values of its checksums, but not in the order of .*apply"
OTHER_VALUES = "array {} has other values than its checksums"
PLACEMENT = THIS.placement.documents
TWICE, OF_NEXT = THIS.placement.apply(PLACED), NEXT.placement
ACCIDENTS = {
    "not placed": (THIS.arrays, PLACEMENT, OTHER_ORDER, 0),
    "placed twice": (TWICE, PLACEMENT, OTHER_ORDER, 0),
    "labels not placed": (seen("labels", THIS.arrays), PLACEMENT, OTHER_ORDER, 0),
    "tokens placed twice": (seen("tokens", TWICE), PLACEMENT, OTHER_ORDER, 1),
    "weights not placed": (seen("weights", THIS.arrays), PLACEMENT, OTHER_ORDER, 2),
    "the next documents": (PLACED, OF_NEXT.documents, OTHER_ORDER, 0),
    "the next placement": (OF_NEXT.apply(THIS.arrays), OF_NEXT.documents, OTHER_ORDER, 0),
    "the next tokens": (
        *(seen("tokens", THIS.placement.apply(NEXT.arrays)), PLACEMENT),
        *(OTHER_VALUES, 1),
    ),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_accidents_in_placed_order(name):
    arrays, documents, message, number = ACCIDENTS[name]
    assert check(PLACED, THIS.checksums, PLACEMENT)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message.format(number)) as error:
        jax.block_until_ready(check(arrays, THIS.checksums, documents))
    assert "check_tokens over axis" in str(error.value)


def test_without_errors_it_returns_false():
    assert check(PLACED, THIS.checksums, PLACEMENT, implementation="xla")
    for arrays, documents, *_ in ACCIDENTS.values():
        assert not check(arrays, THIS.checksums, documents, implementation="xla")


def test_zigzag_order_in_shard_map():
    documents = THIS.documents.zigzag(4)
    specs = documents.specs(AXIS, "data")

    @jax.jit
    @partial(jax.shard_map, mesh=MESH, in_specs=(P("data", AXIS), P("data"), specs), out_specs=P())
    def step(arrays, checksums, documents):
        right = sequence.check_tokens(arrays, checksums, documents=documents, axis_name=AXIS)
        return jax.lax.pmin(right.astype(jnp.int32), "data")

    arrays = documents.apply(THIS.arrays)
    assert step(arrays, THIS.checksums, documents)
    for wrong in (THIS.arrays, documents.apply(arrays), seen("tokens", THIS.arrays, arrays)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="not in the order of the documents"):
            jax.block_until_ready(step(wrong, THIS.checksums, documents))


def test_tokens_that_the_ranks_cannot_share_equally():
    arrays, documents = jax.tree.map(lambda x: x[:, :30], THIS.arrays), Documents(IDS[:, :30])
    checksums = sequence.token_checksums(arrays, documents=documents)
    assert check(arrays, checksums, documents)


def test_checksums_know_no_order_and_no_dtype():
    """Sums of a group of rows are those in every order; a device's are those of the loader."""
    for documents, arrays in (
        (PLACEMENT, PLACED),
        (THIS.documents.zigzag(4), THIS.documents.zigzag(4).apply(THIS.arrays)),
    ):
        got = sequence.token_checksums(arrays, documents=documents)
        assert isinstance(got, np.ndarray)
        of_groups = lambda x: x.reshape(2, 2, *x.shape[1:]).sum(1, dtype=np.uint32)
        np.testing.assert_array_equal(*map(of_groups, (got, THIS.checksums)))
    on_device = jax.tree.map(jnp.asarray, (THIS.arrays, THIS.documents))
    got = sequence.token_checksums(on_device[0], documents=on_device[1])
    np.testing.assert_array_equal(got, THIS.checksums)


def test_checksums_differ_in_every_value():
    """Of a token, an id or a position: the sum of its row and of the arrays from there on."""
    at = np.zeros(IDS.shape, bool)
    at[1, 3] = True
    changed = {**THIS.arrays, "tokens": THIS.arrays["tokens"] + at}
    got = sequence.token_checksums(changed, documents=THIS.documents)
    want = np.zeros(got.shape, bool)
    want[1, 1:, 0] = want[1, 1, 1] = True
    np.testing.assert_array_equal(got != THIS.checksums, want)
    got = sequence.token_checksums(THIS.arrays, documents=NEXT.documents)
    want = np.zeros(got.shape, bool)
    want[0, :, 0] = True
    np.testing.assert_array_equal(got != THIS.checksums, want)
