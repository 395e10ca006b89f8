"""The faults that a stress on a GPU must find can be planted in the sources as they are."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "gpu"))

from planted_fault import FAULTS, ROOT, plant


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_one_header(fault, tmp_path):
    plant(fault, tmp_path)
    changed = [
        str(file.relative_to(ROOT / "csrc"))
        for file in (ROOT / "csrc").rglob("*.*")
        if file.is_file() and file.read_bytes() != (tmp_path / file.relative_to(ROOT)).read_bytes()
    ]
    assert changed == [FAULTS[fault][0]]
