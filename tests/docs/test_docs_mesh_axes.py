"""docs/mesh_axes.md: its code runs, and its results are those of dense attention."""

import pathlib
import re
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from packed_batches import pack

import jax_cp_dispatch as cpd

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "mesh_axes.md").read_text()
B, T = 2, 32


def dense(q, k, v, segment_ids):
    """Causal attention inside documents, by a [T, T] mask; zero for padding."""
    same = segment_ids[:, :, None] == segment_ids[:, None]
    mask = (same & np.tri(T, dtype=bool))[:, None]
    out = jax.nn.dot_product_attention(q, k, v, mask=mask)
    return np.where(segment_ids[..., None, None] > 0, out, 0)


def draw(seed):
    rng = np.random.default_rng(seed)
    segment_ids, _ = pack(rng, B, T, max_length=20)
    qkv = (rng.normal(size=(B, T, n, 8)).astype(np.float32) for n in (4, 2, 2))
    return [*qkv, segment_ids.astype(np.int32)]


def test_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    on_axes, plans, processes, two_axes, two_levels, stages = blocks
    q, k, v, segment_ids = draw(0)
    arrays = q, k, v, segment_ids
    names: dict[str, Any] = dict(jax=jax, np=np, cpd=cpd, partial=partial, P=P)
    names |= dict(AxisType=AxisType, NamedSharding=NamedSharding)
    names |= dict(q=q, k=k, v=v, segment_ids=segment_ids)
    want = dense(*arrays)

    exec(on_axes, names)
    np.testing.assert_allclose(names["attend"](*arrays), want, atol=1e-5)
    exec(plans, names)
    np.testing.assert_allclose(names["out"], want, atol=1e-5)
    exec(processes, names)
    assert all(x.sharding.spec == P("data") for x in jax.tree.leaves(names["documents"]))

    rng = np.random.default_rng(3)
    lengths = [[20, 7, 5], [32]]
    ids = np.stack([np.repeat(np.arange(1, 1 + len(row)), row) for row in lengths])
    names |= dict(lengths=lengths, segment_ids=ids)
    exec(two_axes, names)
    out = names["placement"].restore(np.asarray(names["out"]))
    np.testing.assert_allclose(out, dense(q, k, v, ids), atol=1e-5)

    names |= dict(q=q, k=k, v=v, segment_ids=segment_ids)
    exec(two_levels, names)
    np.testing.assert_allclose(names["out"], want, atol=1e-5)

    three, four = '(2, 2, 2), ("data",', '(2, 1, 2, 2), ("stage", "data",'
    assert three in on_axes
    exec(on_axes.replace(three, four).replace("* 3", "* 4"), names)
    exec(stages, names)
    each = [np.stack([x, rng.permutation(x, axis=3)]) for x in (q, k, v)]
    out = names["attend_stages"](*each, np.stack([segment_ids] * 2))
    for stage in range(2):
        want = dense(each[0][stage], each[1][stage], each[2][stage], segment_ids)
        np.testing.assert_allclose(out[stage], want, atol=1e-5)
