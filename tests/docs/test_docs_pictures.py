"""Pictures of the documentation are those that their scripts draw."""

import numpy as np
import pytest
from in_ci import in_ci
from pictures import IMAGES, drawing_script, texts

from jax_cp_dispatch.comm_gemm import choose_comm_gemm

DRAWN = sorted(path.stem.removeprefix("draw_") for path in IMAGES.glob("draw_*.py"))


@in_ci
@pytest.mark.parametrize("name", DRAWN)
def test_picture_matches_the_script(name, tmp_path):
    drawing_script(name).draw(tmp_path)
    assert texts(tmp_path / f"{name}.svg") == texts(IMAGES / f"{name}.svg")


def test_overlap_follows_the_cost_model():
    """Its totals equal the predictions, except for the time to start chunks."""
    script, times = drawing_script("overlap"), {}
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
        choice = choose_comm_gemm(shape, hardware=script.H100)
        assert total + latency == pytest.approx(choice.seconds[label], rel=1e-6), label


def test_swizzle_follows_the_formula_beside_it():
    row, block = np.divmod(np.arange(512), 4)
    offset = row % 32 * 16 + row // 32 * 4 + block
    np.testing.assert_array_equal(drawing_script("swizzle").order()[offset], np.arange(512))
