"""docs/comm_gemm.md: code runs with the stated results."""

import pathlib
import re

import jax
import numpy as np

import jax_cp_dispatch as cpd

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comm_gemm.md").read_text()


def test_code_blocks_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    buffers = set(cpd.buffers.list_comm_overlap_buffers())
    blocks = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", PAGE, flags=re.S)
    for code, printed in blocks:
        exec(code, names)
        out = capsys.readouterr().out
        assert not printed or out == printed
    assert len(blocks) == 6
    x, up, down = names["x"], names["up"], names["down"]
    for name in ("y", "y_of_global_arrays", "y_with_buffer"):
        expected = jax.nn.gelu(x @ up) @ down
        np.testing.assert_allclose(names[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, weight in zip("qkv", names["arrays"], strict=True):
        expected = np.einsum("btd,dnh->btnh", x, weight)
        np.testing.assert_allclose(names[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(names["product"], up @ down, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(names["gathered"], x[0])
    assert names["profile"].bound <= names["profile"].total
    assert {path.name for path in tmp_path.iterdir()} >= {"overlap.json", "overlap.svg"}
    assert set(cpd.buffers.list_comm_overlap_buffers()) == buffers
