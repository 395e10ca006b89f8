"""docs/comm_gemm.md: code runs with the stated results, and the picture is current."""

import importlib.util
import pathlib
import re

import jax
import numpy as np
import pytest
from pictures import texts

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
    q, *_, out = names["arrays"]
    expected = np.einsum("btd,dnh,nhe->bte", x, q, out)
    np.testing.assert_allclose(names["y_of_heads"], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(names["product"], up @ down, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(names["gathered"], x[0])
    assert names["profile"].bound <= names["profile"].total
    assert {path.name for path in tmp_path.iterdir()} >= {"overlap.json", "overlap.svg"}
    assert set(cpd.buffers.list_comm_overlap_buffers()) == buffers


def drawing_script():
    path = ROOT / "docs" / "images" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_picture_matches_the_script(tmp_path):
    drawing_script().draw(tmp_path)
    assert texts(tmp_path / "overlap.svg") == texts(ROOT / "docs" / "images" / "overlap.svg")


def test_picture_follows_the_cost_model():
    """Its totals equal the predictions, except for the time to start chunks."""
    script, times = drawing_script(), {}
    for title, run in script.overlaps().items():
        assert ", predicted on " in title
        assert {span.rank for span in run.spans} == set(range(script.P))
        times[title] = run.total
    predicted = [
        (shape, label, chunks * script.H100.link_latency if chunks > 1 else 0.0)
        for shape, label, chunks in (
            (script.IN, "none", 1),
            (script.IN, "ring", script.P),
            (script.OUT, "none", 1),
            (script.OUT, "ring", script.P),
            (script.OUT, "pipeline 4", 4),
        )
    ]
    for total, (shape, label, latency) in zip(times.values(), predicted, strict=True):
        choice = cpd.choose_comm_gemm(shape, hardware=script.H100)
        assert total + latency == pytest.approx(choice.seconds[label], rel=1e-6), label


def test_empty_pictures_are_rejected(tmp_path):
    from jax_cp_dispatch.plots import plot_overlap

    for profiles in ({}, {"nothing": cpd.profiling.OverlapProfile(None, ())}):
        with pytest.raises(ValueError, match="plot_overlap: the profiles contain no span"):
            plot_overlap(profiles, tmp_path / "no.svg")
