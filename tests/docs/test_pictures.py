"""The pictures of the documentation are those that its scripts draw."""

import importlib.util

import numpy as np
from doc_pages import DOCS
from pictures import texts

IMAGES = DOCS / "images"


def script(name):
    spec = importlib.util.spec_from_file_location(name, IMAGES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_match_their_scripts(tmp_path):
    for name in ("draw", "draw_swizzle"):
        script(name).draw(tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["cycles.svg", "masks.svg", "overlap.svg", "schedules.svg", "swizzle.svg"]
    for name in drawn:
        assert texts(tmp_path / name) == texts(IMAGES / name), name


def test_swizzled_offsets_are_those_of_the_formula_in_the_picture():
    row, block = np.divmod(np.arange(512), 4)
    offset = row % 32 * 16 + row // 32 * 4 + block
    np.testing.assert_array_equal(script("draw_swizzle").order()[offset], np.arange(512))
