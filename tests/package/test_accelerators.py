"""The compilers without devices: what is read from a compiled program, and the page of results."""

import importlib
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "accelerators"

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%attend.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%p), metadata={op_name="jit(f)/cpd.attention/exp"}
}

ENTRY %main (x: bf16[4,128]) -> bf16[4,128] {
  %x = bf16[4,128]{1,0} parameter(0)
  %start = (bf16[4,128]{1,0}, bf16[4,128]{1,0}, u32[]) collective-permute-start(%x), channel_id=1
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%attend.1
  %done = bf16[4,128]{1,0} collective-permute-done(%start)
  %second = (bf16[4,128]{1,0}, bf16[4,128]{1,0}, u32[]) collective-permute-start(%done)
  %ready = bf16[4,128]{1,0} collective-permute-done(%second)
  %gathered = bf16[16,128]{1,0} all-gather(%ready), dimensions={0}
  ROOT %r = bf16[4,128]{1,0} copy(%ready)
}
"""


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: importlib.import_module(name)


def test_what_lies_between_the_parts_of_a_collective_overlaps_with_it(module):
    program = module("schedule").Program(PROGRAM)
    assert program.collectives() == {"all-gather": 1, "collective-permute": 2}
    assert program.count("fusion") == 1
    row = 4 * 128 * 2
    assert program.overlap() == {
        "collective-permute": {"bytes": 2 * row, "attention": row},
        "all-gather": {"bytes": 16 * 128 * 2},
    }


def test_the_page_shows_the_results(module):
    table = module("table")
    assert table.PAGE.read_text() == table.page(), "run python accelerators/table.py"


def test_recorded_gpu_calls_keep_their_order_by_default(module):
    module("targets").check_order_of_recorded_calls()
