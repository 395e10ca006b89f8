"""docs/trainers.md: its code runs, and every loss in it is that of dense attention."""

import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_ci import in_ci

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "trainers.md").read_text()


def dense(segment_ids):
    """Causal attention inside documents, by a [T, T] mask."""
    same = segment_ids[:, :, None] == segment_ids[:, None]
    seen = np.tri(same.shape[1], dtype=bool)
    mask = (same & seen)[:, None]
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask)


def check_fsdp(names):
    """Gathers are as many as the page says, none of tokens; masters keep dtype and shards."""
    gathered = names["gathered"]
    assert f"`gathered` has {len(gathered)} shapes" in PAGE
    rows = len(names["batch"]["tokens"])  # of tokens [B, T, ...]; no weight begins with so few
    of_tokens = re.compile(rf"\(?\w+\[({rows}|{rows // names['NUM_GROUPS']}),")
    assert not any(of_tokens.match(shape) for shape in gathered), gathered
    masters = zip(*map(jax.tree.leaves, (names["masters"], names["shardings"])), strict=True)
    for w, sharding in masters:
        assert w.dtype == jnp.float32 and w.sharding.is_equivalent_to(sharding, w.ndim)
    for x in jax.tree.leaves(names.get("training")):  # without optax there is none
        assert x.sharding.device_set == {*names["mesh"].devices.flat}


@in_ci
def test_code_blocks_run():
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    values, missing = [], set()
    for code in blocks:
        libraries = re.findall(r"^(?:from|import) (flax|equinox|optax)", code, flags=re.M)
        missing |= {name for name in libraries if not importlib.util.find_spec(name)}
        if libraries and missing:
            continue
        exec(code, names)
        values += [names.pop("value")] if "value" in names else []
    assert (len(blocks), len(values)) == (16, 8)
    assert 1 <= names["after"] <= names["before"][0]
    ring, placed = names["profiles"]
    assert sum(ring.work) == sum(placed.work) and names["speed_up"] > 0
    assert placed.work_imbalance <= ring.work_imbalance
    batch = jax.tree.map(np.asarray, names["batch"])
    attend = dense(batch["documents"].segment_ids)
    want = names["loss"](names["params"], batch, attend)
    np.testing.assert_allclose(values, want, rtol=1e-6)
    np.testing.assert_allclose(names["bfloat16_value"], want, rtol=1e-2)
    check_fsdp(names)
    for y in (names[name] for name in ("y", "z") if name in names):
        assert y.shape == names["x"].shape and jnp.isfinite(y).all()
    if missing:
        pytest.skip(f"only its blocks with {missing} did not run: install the test extra")
