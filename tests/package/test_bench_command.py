"""The bench command: every section on small sizes, what it compares, and errors."""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from functools import partial

import jax
import pytest

from jax_cp_dispatch.bench_command import gemm, in_processes, movement, planning, run
from jax_cp_dispatch.bench_command.compare import Earlier, committed, slower
from jax_cp_dispatch.bench_command.ranks import Row
from jax_cp_dispatch.bench_command.sizes import CPU, GPU, QUICK, sizes_for
from jax_cp_dispatch.bench_command.step import Model

TINY = dataclasses.replace(
    QUICK,
    planning_tokens=512,
    moved_tokens=16,
    feature=(2, 4),
    attention_tokens=128,
    heads=2,
    head_size=8,
    gemms=((gemm.GATHER, 64, 16, 64), (gemm.SCATTER, 64, 64, 16)),
    step_tokens=128,
    model=Model(layers=2, heads=2, head_size=8, dtype="float32"),
    process_bytes=1 << 17,
    process_gemms=((gemm.GATHER, 64, 16, 64),),
)
DEVICES = 8


def bench(*arguments):
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return run.main(parser.parse_args([str(x) for x in arguments]))


@pytest.fixture
def tiny(monkeypatch):
    """Small sizes and few algorithms; compiling takes most of the time."""
    monkeypatch.setattr(run, "sizes_for", lambda platform, **_: TINY)
    monkeypatch.setitem(run.attention._MATMUL, "cpu", 64)
    monkeypatch.setattr(run.attention, "CAUSAL", ("ring",))
    monkeypatch.setattr(run.attention, "PACKED", ("placed",))
    monkeypatch.setattr(run.step, "ALGORITHMS", ("balanced",))
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


def test_every_section_is_measured_and_compared_with_an_earlier_run(tiny, capsys, tmp_path):
    code, said = bench("--json"), capsys.readouterr()
    assert "[6/6] measuring processes" in said.err
    report = json.loads(said.out)
    assert (report["errors"], code) == ({}, 0)
    assert report["devices"].startswith(f"{DEVICES} devices")
    rows = report["rows"]
    assert tuple(dict.fromkeys(row["section"] for row in rows)) == run.SECTIONS
    names = {(row["section"], row["what"]) for row in rows}
    assert len(names) == len(rows)
    assert {
        ("planning", "place_tokens, 8 ranks"),
        ("movement", movement.DONATED),
        ("movement", movement.SMALL_DISPATCH),
        ("attention", "placed, packed"),
        ("gemm", "all_gather_matmul, ring direct"),
        ("step", "jax.nn, sharded by XLA"),
        ("processes", movement.COMBINE),
    } <= names
    for row in rows:
        assert row["seconds"] > 0
        # Of these sizes only the small one is among the committed results.
        assert (row["earlier"] is not None) == (row["what"] == movement.SMALL_DISPATCH)
        if row["of_limit"]:
            assert row["limit"] and row["rate"] > 0
        if row["speedup"]:
            same = [x for x in rows if (x["section"], x["size"]) == (row["section"], row["size"])]
            if len(same) > 1:  # the alternative is among the rows
                assert any(x["speedup"] == pytest.approx(1) for x in same)

    earlier = tmp_path / "earlier.json"
    for row in rows:  # as if the machine had been ten times as fast relative to its limits
        row["of_limit"] = row["of_limit"] and 1e3 * row["of_limit"]
    earlier.write_text(json.dumps(report))
    pictures = tmp_path / "pictures"
    assert bench("gemm", "--compare", earlier, "--pictures", pictures) == 0
    printed = capsys.readouterr().out
    assert "8 of 8 rows have earlier results" in printed
    assert "8 noticeably slower" in printed and "gemm: all_gather_matmul, none: 0.0" in printed
    assert [path.name for path in pictures.iterdir()] == ["gemm.png"]


def test_a_wrong_result_is_an_error_and_the_other_sections_still_run(tiny, capsys, monkeypatch):
    monkeypatch.setattr(movement, "dispatch", lambda x, m, **options: x)
    assert bench("movement", "planning") == 1
    printed = capsys.readouterr().out
    assert "movement" not in printed.split("planning:")[1]
    assert "Error: " in printed and "plan_attention, 8 ranks" in printed


def test_dense_attention_is_omitted_without_the_memory_for_it(tiny, capsys, monkeypatch):
    monkeypatch.setattr(run.attention, "_available_bytes", lambda: 0)
    assert bench("attention", "--json") == 0
    said = capsys.readouterr()
    assert "bench: dense attention is omitted: it may need" in said.err
    rows = json.loads(said.out)["rows"]
    assert [row["what"] for row in rows] == ["ring, causal", "placed, packed"]
    assert all(row["of_limit"] and row["speedup"] is None for row in rows)


def test_ctrl_c_keeps_what_was_measured(tiny, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "place_tokens", interrupted)
    assert bench("--json", "planning", "movement") == 130
    report = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in report["rows"]] == ["plan_attention, 8 ranks"]
    assert report["errors"] == {"planning": run.INTERRUPTED}
    assert bench("planning", "movement") == 130
    printed = capsys.readouterr().out
    assert "plan_attention, 8 ranks" in printed and run.INTERRUPTED in printed
    assert "movement" not in printed


def test_processes_end_with_the_measurement(tiny, monkeypatch):
    """Also if it ends early; their rows come one by one."""
    start, started = subprocess.Popen, []
    monkeypatch.setattr(
        in_processes.subprocess,
        "Popen",
        lambda *x, **y: started.append(start(*x, **y)) or started[0],
    )
    rows = in_processes.measure(2, TINY.process_bytes, TINY.process_gemms, repeats=1)
    assert next(rows).section == "processes"
    (launcher,) = started
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    workers = [int(pid) for pid in children.read_text().split()]
    assert launcher.poll() is None and len(workers) == 2
    rows.close()
    assert launcher.poll() is not None
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize("platform, quick", [("cpu", False), ("cpu", True), ("gpu", False)])
def test_sizes_suit_every_number_of_ranks(platform, quick):
    plain = {"cpu": QUICK if quick else CPU, "gpu": GPU}[platform]
    sizes_of = partial(sizes_for, platform, quick=quick)
    assert sizes_of(num_ranks=8, num_processes=2) == plain  # those of the committed results
    sizes = sizes_of(num_ranks=6, num_processes=3)
    shared = [(sizes.attention_tokens, 12), (sizes.step_tokens, 12)]
    shared += [(size, 12) for _, *shape in sizes.gemms for size in shape]
    shared += [(size, 6) for _, *shape in sizes.process_gemms for size in shape]
    assert all(size % parts == 0 for size, parts in shared)


def test_slower_compares_the_ratio_that_depends_least_on_the_machine():
    row = Row("a", "b", "c", seconds=2.0, of_limit=0.5, speedup=2.0)
    old = Earlier("a", "b", "c", seconds=1.0, of_limit=0.5, speedup=4.0, origin="")
    assert slower(row, old) is None
    assert slower(row, old._replace(of_limit=1.0)) == 0.5
    assert slower(row, old._replace(of_limit=None)) == 0.5
    assert slower(row, old._replace(of_limit=None, speedup=None)) == 0.5


def test_committed_results_have_the_default_sizes():
    rows = committed()
    assert {row.section for row in rows} == set(run.SECTIONS)
    assert len({row[:3] for row in rows}) == len(rows)
    sizes = {row.size for row in rows}
    assert f"{8 * CPU.moved_tokens * 2 * 16 * 128 / 1e6:.0f} MB, 8 devices" in sizes
    assert any(f"{CPU.step_tokens} tokens" in size for size in sizes)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["attenton"], "no section is called attenton. Pass some of planning, movement"),
        (["--devices", "0"], "--devices is 0; pass 1 to 1024"),
        (["--devices", "99999999"], "--devices is 99999999; pass 1 to 1024"),
        (["--devices", "9"], "--devices is 9 but JAX has 8 devices"),
        (["--processes", "1"], "--processes is 1; pass 2 to 64"),
        (["--compare", "nowhere"], "cannot read nowhere: No such file"),
        (["--compare", __file__], "is not an output of `bench --json`"),
        (["--pictures", __file__], "cannot create the folder"),
    ],
)
def test_bad_arguments_give_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(run, "start_cpu_devices", lambda count: None)
    assert bench(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("bench: ") and said.err.count("\n") == 1


def test_pictures_without_matplotlib_name_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench("--pictures", tmp_path) == 2
    assert "matplotlib" in capsys.readouterr().err
