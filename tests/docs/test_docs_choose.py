"""docs/choose_an_algorithm.md: code runs, numbers are right.

The code blocks run in one process; the page shows their output below each.
"""

import json
import pathlib
import re

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "choose_an_algorithm.md").read_text()


def test_code_blocks_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", PAGE, flags=re.S)
    for code, printed in blocks:
        exec(code, names)
        out = capsys.readouterr().out
        assert not printed or out == printed
    assert len(blocks) == 5
    # Other cycles give the same attention.
    profile = names["profile"].out[:, names["in_order"]]
    np.testing.assert_allclose(profile, names["out"], rtol=1e-5, atol=1e-5)
    assert (tmp_path / "trace.json").is_file()


@pytest.mark.parametrize(
    "hardware, ranks, tokens, algorithm, quoted",
    [
        ("mi300x", 8, 1024, "hamilton", "5.6 times as fast"),
        ("mi300x", 8, 4096, "hamilton", "3.7 times at 4K"),
        ("mi300x", 8, 16384, "hamilton", "1.02 times at 16K"),
        *(("h100", 8, 2**x, "hamilton", "switch: 1.00;") for x in range(9, 17)),
        *(("h100", 16, 2**x, "hamilton", "1.8 times with the cycles") for x in (10, 11, 12)),
        ("h100", 16, 2048, "hamilton_nodes", "to 6.6 times with"),
        ("h100", 16, 4096, "hamilton_nodes", "5.6 to"),
    ],
)
def test_quoted_gains_are_predicted(hardware, ranks, tokens, algorithm, quoted):
    rows = json.loads((ROOT / "benchmarks/results/predicted_attention.json").read_text())["rows"]
    key = (hardware, ranks, tokens, "causal forward")
    (row,) = [x for x in rows if (*list(x.values())[:3], x["mode"]) == key]
    (number,) = re.findall(r"\d+\.\d+", quoted)
    assert quoted in PAGE
    decimals = len(number.split(".")[1])
    assert f"{row['ms']['zigzag'] / row['ms'][algorithm]:.{decimals}f}" == number
