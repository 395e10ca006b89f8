"""docs/masks.md: its code runs, and every mask admits what its definition says."""

import pathlib
import re

import numpy as np
import pytest
from attention_oracle import masked_attention
from mask_oracle import (
    batch_ranges,
    batch_visible,
    block_pairs,
    prefix_pairs,
    range_pairs,
    shared_prefix_pairs,
    tree_pairs,
)

PAGE = (pathlib.Path(__file__).parents[2] / "docs/masks.md").read_text()


@pytest.fixture(scope="module")
def names():
    values: dict = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(code, values)
    return values


def allowed(names, name):
    ids, of, mask = names["ids"], names["of"], names["examples"][name]
    if not mask.has_arrays:
        return range_pairs(*batch_ranges(mask, ids))
    pairs = {
        "PrefixLM": lambda: prefix_pairs(of((True, 4), (False, 6), (True, 2), (False, 4))),
        "Blocks": lambda: block_pairs(of((0, 2), (1, 4), (0, 4), (2, 3), (0, 3))),
        "SharedPrefix": lambda: shared_prefix_pairs(names["turns"]),
        "Tree": lambda: tree_pairs(
            of((0, 3), (1, 2), (2, 2), (3, 3), (4, 3), (5, 3)), np.array([[-1, 0, 1, 0, -1, 4]])
        ),
    }
    return batch_visible(ids, pairs[name]())


def test_every_example_equals_dense_attention(names):
    q, k, v = names["q"], names["k"], names["v"]
    for name, out in names["outs"].items():
        want, _ = masked_attention(q, k, v, allowed(names, name))
        np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(names["of_layers"][0], names["outs"]["Tree"], rtol=2e-6, atol=2e-6)
