"""docs/latents.md: its code runs, and gives the attention of the expanded keys and values."""

import pathlib
import re

import numpy as np
from attention_oracle import masked_attention

PAGE = (pathlib.Path(__file__).parents[2] / "docs/latents.md").read_text()


def test_code_block_runs():
    names: dict = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    exec(code, names)
    rows = names["latent"][0], names["rope"][0]
    k, v = (np.asarray(x)[None] for x in names["expand"](names["weights"], rows))
    document = np.repeat([1, 2], [40, 24])
    allowed = (document[:, None] == document) & np.tri(64, dtype=bool)
    want, _ = masked_attention(names["q"], k, v, allowed[None])
    np.testing.assert_allclose(names["out"], want, rtol=0, atol=3e-6)
