"""The compilers without devices: what is read from a compiled program, and the page of results."""

import ast
import importlib
import importlib.util
import inspect
import json
import pathlib

import pytest

import jax_cp_dispatch as cpd
from jax_cp_dispatch._ranks import runtime

FOLDER = pathlib.Path(__file__).parents[2] / "accelerators"

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%attend.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%p), metadata={op_name="jit(f)/cpd.attention/exp"}
}

%nothing.1 (n: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} parameter(0)
}

ENTRY %main (x: bf16[4,128]) -> bf16[4,128] {
  %x = bf16[4,128]{1,0} parameter(0)
  %start = (bf16[4,128]{1,0}, bf16[4,128]{1,0}, u32[]) collective-permute-start(%x), channel_id=1
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%attend.1
  %done = bf16[4,128]{1,0} collective-permute-done(%start)
  %second = (bf16[4,128]{1,0}, bf16[4,128]{1,0}, u32[]) collective-permute-start(%done)
  %ready = bf16[4,128]{1,0} collective-permute-done(%second)
  %third = (bf16[4,128]{1,0}, bf16[4,128]{1,0}, u32[]) collective-permute-start(%ready)
  %z = f32[8]{0} conditional(%i, %y, %y), branch_computations={%nothing.1, %attend.1}
  %came = bf16[4,128]{1,0} collective-permute-done(%third)
  %gathered = bf16[16,128]{1,0} all-gather(%ready), dimensions={0}
  ROOT %r = bf16[4,128]{1,0} copy(%ready)
}
"""


LOOP = """\
%wrapped.1 (w: f32[16]) -> f32[16] {
  %w = f32[16]{0} parameter(0)
  ROOT %all = f32[16]{0} all-to-all(%w), dimensions={0}
}

%body.1 (b: f32[16]) -> f32[16] {
  %b = f32[16]{0} parameter(0)
  %go = ((f32[16]{0}), f32[16]{0}) all-to-all-start(%b), calls=%wrapped.1
  %y = f32[16]{0} fusion(%b), metadata={op_name="jit(f)/cpd.attention/exp"}
  ROOT %come = f32[16]{0} all-to-all-done(%go)
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %last = f32[16]{0} all-to-all(%x), dimensions={0}
  ROOT %l = f32[16]{0} while(%last), condition=%until.1, body=%body.1, \
backend_config={"known_trip_count":{"n":"7"}}
}
"""


EXCHANGES = """\
ENTRY %main (x: bf16[4,128]) -> bf16[6,128] {
  %x = bf16[4,128]{1,0} parameter(0)
  %whole = bf16[6,128]{1,0} custom-call(%x), custom_call_target="jax_cp_dispatch.dispatch"
  %start = (bf16[6,128]{1,0}, bf16[4,128]{1,0}, f32[8]{0}) custom-call(%x), \
custom_call_target="jax_cp_dispatch.dispatch_start", custom_call_has_side_effect=true
  %held = f32[8]{0} get-tuple-element(%start), index=2
  %got = bf16[6,128]{1,0} get-tuple-element(%start), index=0
  %second = (bf16[4,128]{1,0}, bf16[6,128]{1,0}, f32[8]{0}) custom-call(%whole), \
custom_call_target="jax_cp_dispatch.combine_start", custom_call_has_side_effect=true
  %back = bf16[4,128]{1,0} get-tuple-element(%second), index=0
  %done = bf16[4,128]{1,0} custom-call(%back), custom_call_target="jax_cp_dispatch.exchange_done"
  %product = bf16[4,128]{1,0} fusion(%x), metadata={op_name="jit(f)/dot_general"}
  %last = bf16[6,128]{1,0} custom-call(%got), custom_call_target="jax_cp_dispatch.exchange_done"
  ROOT %sum = bf16[4,128]{1,0} fusion(%last), metadata={op_name="jit(f)/cpd.attention/add"}
}
"""


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: importlib.import_module(name)


def test_what_lies_between_the_parts_of_a_collective_overlaps_with_it(module):
    program = module("schedule").Program(PROGRAM)
    assert program.collectives() == {"all-gather": 1, "collective-permute": 3}
    assert program.count("fusion") == 1
    row = 4 * 128 * 2
    assert program.overlap() == {
        "collective-permute": {"bytes": 3 * row, "attention": 2 * row},
        "all-gather": {"bytes": 16 * 128 * 2},
    }


def test_bytes_count_in_every_turn_of_a_loop(module):
    program = module("schedule").Program(LOOP)
    assert program.collectives() == {"all-to-all": 2}
    assert program.overlap() == {"all-to-all": {"bytes": 8 * 64, "attention": 7 * 64}}


def test_what_lies_between_the_calls_of_an_exchange_overlaps_with_it(module):
    program = module("schedule").Program(EXCHANGES)
    assert program.collectives() == {"exchange": 3}
    row = 128 * 2
    assert program.overlap() == {"exchange": {"bytes": 16 * row, "product": 6 * row}}


def beside_work(row):
    """Returns whether a compiled program has enough of its exchanges' bytes beside work."""
    least = 1.0 if "_start" in row["program"] else 0.5  # half of the heads: of the bytes
    moved = row["overlap"]["exchange"]
    return max(moved.get("attention", 0), moved.get("product", 0)) >= least * moved["bytes"]


def with_overlap(module):
    programs = module("programs").PROGRAMS_FOR_GPUS
    attending = "placed, cuda_peer", "balanced, planned before, cuda_peer"
    return {name: program for name, program in programs.items()
            if "_start" in name or name in attending}  # fmt: skip


def test_exchanges_overlap_in_compiled_programs(module):
    """By the compiler for H100, if it is installed: an environment of `./run accelerators`."""
    if runtime.cuda is None:
        pytest.skip(runtime.cuda_reason)
    if importlib.util.find_spec("jax_plugins") is None:
        pytest.skip("JAX's CUDA plugin, which has the compiler, is not installed")
    target = module("targets").TARGETS["8 H100"]
    shapes = module("shapes").Shapes(target.devices())
    for name, program in with_overlap(module).items():
        row = module("compile").compiled(target, shapes, name, program)
        assert row["state"] == "compiled", row["reason"]
        assert beside_work(row), name


def test_exchanges_overlap_in_the_results_of_every_release(module):
    rows = json.loads(module("table").RESULTS.read_text())["rows"]
    rows = [row for row in rows if row["program"] in with_overlap(module)]
    found = {(row["program"], row["versions"]["jax"].rsplit(".", 1)[0]) for row in rows}
    assert len(found) == 2 * len(with_overlap(module)) == len(rows)
    assert all(beside_work(row) for row in rows), rows


def test_exchanges_of_a_ring_overlap_with_attention_on_every_accelerator(module):
    """Half of the bytes or more: all but the keys of the backward pass's first step, and the last
    two exchanges of its gradients. The compiler for TPU v5e 4x8 starts no collective early.
    """
    rows = json.loads(module("table").RESULTS.read_text())["rows"]
    found = {row["target"]: row["overlap"]["collective-permute"] for row in rows
             if row["program"] == "ring"}  # fmt: skip
    assert found.keys() == module("targets").TARGETS.keys()
    del found["TPU v5e 4x8"]
    assert all(2 * moved["attention"] >= moved["bytes"] for moved in found.values()), found


def test_a_layer_of_experts_compiles_for_every_accelerator(module):
    rows = json.loads(module("table").RESULTS.read_text())["rows"]
    states = {x["target"]: x["state"] for x in rows if x["program"] == "layer of experts"}
    assert states == dict.fromkeys(module("targets").TARGETS, "compiled")


def test_the_page_shows_the_results(module):
    table = module("table")
    assert table.PAGE.read_text() == table.page(), "run python accelerators/table.py"


def test_attention_has_its_kernels_on_every_tpu(module):
    table, targets = module("table"), module("targets").TARGETS
    programs = {name: set() for name, target in targets.items() if target.platform == "tpu"}
    for row in json.loads(table.RESULTS.read_text())["rows"]:
        if row.get("kernels"):
            programs[row["target"]].add(row["program"])
    attending = ("ring", "placed", "ulysses", "ring, data and tensor axes")
    for names in programs.values():
        assert names == programs["TPU v5e 2x2"] and names.issuperset(attending)


def test_recorded_gpu_calls_keep_their_order_by_default(module):
    module("targets").check_order_of_recorded_calls()


def test_every_public_function_that_runs_on_devices_is_in_a_program(module):
    """Named by a program, or by the list of those in none, and only by one of them."""
    left_out = {name for group in module("programs").NOT_COMPILED.values() for name in group}
    parts = {name: getattr(cpd, name) for name in cpd.__all__}
    modules = {name: part for name, part in parts.items() if inspect.ismodule(part)}
    names = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("cpd", *modules):
                names.add(node.attr)
            elif isinstance(node, ast.alias):
                names.add(node.name)
    functions = set()
    for part in (cpd, *(part for name, part in modules.items() if name not in left_out)):
        public = {name: getattr(part, name) for name in part.__all__}
        functions |= {name for name, value in public.items() if inspect.isroutine(value)}
    assert functions - names - left_out == set()
    assert left_out - functions - modules.keys() == set()
    assert left_out & functions & names == set()
