"""Layers of batches without rows, of rows without tokens, of tokens without channels or values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Documents, sequence

SIZES = {"x": (3,), "heads": (2, 4), "v": (2, 3), "gates": (2,)}


class Sum:
    """A kernel that adds the sum of the document before the piece."""

    def summary(self, inputs):
        return inputs.sum((0, 1))

    def apply(self, map_, state):
        return map_ if state is None else state + map_

    def run(self, inputs, states, piece_ids):
        return inputs + states[jnp.minimum(piece_ids, len(states) - 1)]


def arrays_of(batch, num_tokens, **without):
    """Returns arrays [B, T, ...] and taps; `without`: sizes of the last axes, by name."""
    shapes = {name: (*shape[:-1], without.get(name, shape[-1])) for name, shape in SIZES.items()}
    rows = {name: (batch, num_tokens, *shape) for name, shape in shapes.items()}
    arrays = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in rows.items()}
    return arrays | {"taps": jnp.ones((4, *shapes["x"]))}


def layers(x, heads, v, gates, taps, **given):
    """Returns the output of a layer of each kind, and an array of its shape and dtype."""
    yield sequence.shift(x, 1, fill=1, **given), x
    yield sequence.causal_conv(x, taps, **given), x
    yield sequence.linear_recurrence(x, -x, **given), x
    yield sequence.recurrence(x, Sum(), **given), x
    yield sequence.gated_delta_rule(heads, heads, v, -gates, gates, **given), v


def check(arrays, *, is_run=False, **given):
    """Of traced programs; compiling them takes long."""

    def loss(arrays):
        found = list(layers(**arrays, **given))
        assert all((y.shape, y.dtype) == (like.shape, like.dtype) for y, like in found)
        outputs = [y for y, _ in found]
        return sum(y.astype(jnp.float32).sum() for y in outputs), outputs

    step = jax.value_and_grad(loss, has_aux=True)
    (value, outputs), gradients = (jax.jit(step) if is_run else partial(jax.eval_shape, step))(
        arrays
    )
    assert not any(y.size for y in outputs)
    for name, x in arrays.items():
        assert (gradients[name].shape, gradients[name].dtype) == (x.shape, x.dtype)
    if is_run:
        assert value == 0 and not any(x.any() for x in gradients.values())


@pytest.mark.parametrize("rows, is_run", [((0, 6), False), ((2, 0), True)])
def test_no_rows_and_no_tokens(rows, is_run):
    ids = np.ones(rows, np.int32)
    check(arrays_of(*rows), is_run=is_run, axis_name=AXIS, mesh=mesh_of(2), segment_ids=ids)


def test_no_channels_and_no_values():
    ids = np.array([[1, 1, 2, 2, 2, 2]])
    check(arrays_of(1, 6, x=0, v=0), axis_name=AXIS, mesh=mesh_of(2), segment_ids=ids)


def test_pieces_of_no_tokens():
    def local(x, documents):
        pieces = sequence.document_pieces(documents, axis_name=AXIS)
        return sequence.shift(x, 1, documents=pieces, axis_name=AXIS)

    x, documents = jnp.ones((1, 0, 3)), Documents(np.ones((1, 0), np.int32))
    rows = P(None, AXIS)
    specs = rows, documents.specs(AXIS)
    run = jax.shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=rows)
    assert jax.jit(run)(x, documents).shape == x.shape
