"""The compilers without devices: what is read from a compiled program, and the page of results."""

import ast
import importlib
import inspect
import json
import pathlib

import pytest

import jax_cp_dispatch as cpd

FOLDER = pathlib.Path(__file__).parents[2] / "accelerators"

# The parts of a collective, the calls of an exchange, and every turn of a loop.
PROGRAM = """\
HloModule jit_f, is_scheduled=true

%attend.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%p), metadata={op_name="jit(f)/cpd.attention/exp"}
}

%nothing.1 (n: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} parameter(0)
}

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

ENTRY %main (x: bf16[4,128]) -> bf16[6,128] {
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
  %last = f32[16]{0} all-to-all(%z), dimensions={0}
  %l = f32[16]{0} while(%last), body=%body.1, backend_config={"known_trip_count":{"n":"7"}}
  %whole = bf16[6,128]{1,0} custom-call(%x), custom_call_target="jax_cp_dispatch.dispatch"
  %from = (bf16[6,128]{1,0}, bf16[4,128]{1,0}, f32[8]{0}) custom-call(%x), \
custom_call_target="jax_cp_dispatch.dispatch_start", custom_call_has_side_effect=true
  %held = f32[8]{0} get-tuple-element(%from), index=2
  %got = bf16[6,128]{1,0} get-tuple-element(%from), index=0
  %again = (bf16[4,128]{1,0}, bf16[6,128]{1,0}, f32[8]{0}) custom-call(%whole), \
custom_call_target="jax_cp_dispatch.combine_start", custom_call_has_side_effect=true
  %back = bf16[4,128]{1,0} get-tuple-element(%again), index=0
  %home = bf16[4,128]{1,0} custom-call(%back), custom_call_target="jax_cp_dispatch.exchange_done"
  %product = bf16[4,128]{1,0} fusion(%x), metadata={op_name="jit(f)/dot_general"}
  %end = bf16[6,128]{1,0} custom-call(%got), custom_call_target="jax_cp_dispatch.exchange_done"
  ROOT %sum = bf16[4,128]{1,0} fusion(%end), metadata={op_name="jit(f)/cpd.attention/add"}
}
"""


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: importlib.import_module(name)


def test_what_lies_between_overlaps(module):
    program, row = module("schedule").Program(PROGRAM), 128 * 2  # bytes
    counts = {"all-gather": 1, "collective-permute": 3, "all-to-all": 2, "exchange": 3}
    assert program.collectives() == counts
    assert program.overlap() == {
        "collective-permute": {"bytes": 3 * 4 * row, "attention": 2 * 4 * row},
        "all-gather": {"bytes": 16 * row},
        "all-to-all": {"bytes": 8 * 64, "attention": 7 * 64},
        "exchange": {"bytes": 16 * row, "product": 6 * row},
    }


def test_results_of_every_accelerator(module):
    """The page shows them; exchanges run beside work; kernels of attention are used on TPUs."""
    table, targets = module("table"), module("targets").TARGETS
    assert table.PAGE.read_text() == table.page(), "run python accelerators/table.py"
    rows = json.loads(table.RESULTS.read_text())["rows"]

    # A ring: half of the bytes or more, all but the keys of the backward pass's first step and the
    # last two exchanges of its gradients. The compiler for TPU v5e 4x8 starts none early.
    rings = {
        x["target"]: x["overlap"]["collective-permute"] for x in rows if x["program"] == "ring"
    }
    assert rings.keys() == targets.keys()
    del rings["TPU v5e 4x8"]
    assert all(2 * moved["attention"] >= moved["bytes"] for moved in rings.values()), rings

    # Exchanges between GPUs, by the compilers of two releases.
    attending = "placed, cuda_peer", "balanced, planned before, cuda_peer"
    names = module("programs").PROGRAMS_FOR_GPUS
    names = {name for name in names if "_start" in name or name in attending}
    of_gpus = [x for x in rows if x["program"] in names]
    releases = {(x["program"], x["versions"]["jax"].rsplit(".", 1)[0]) for x in of_gpus}
    assert len(releases) == 2 * len(names) == len(of_gpus)
    for row in of_gpus:
        least = 1.0 if "_start" in row["program"] else 0.5  # half of the heads: of the bytes
        moved = row["overlap"]["exchange"]
        beside_work = max(moved.get("attention", 0), moved.get("product", 0))
        assert beside_work >= least * moved["bytes"], row

    experts = {x["target"]: x["state"] for x in rows if x["program"] == "layer of experts"}
    assert experts == dict.fromkeys(targets, "compiled")

    kernels = {name: set() for name, target in targets.items() if target.platform == "tpu"}
    for row in rows:
        if row.get("kernels"):
            kernels[row["target"]].add(row["program"])
    for names in kernels.values():
        assert names == kernels["TPU v5e 2x2"]
        assert names >= {"ring", "placed", "ulysses", "ring, data and tensor axes"}


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
