"""The bench command: every section on small sizes, and errors."""

import argparse
import json

import jax
import pytest

from jax_cp_dispatch import bench_command
from jax_cp_dispatch.bench_command import attention, gemm, movement

TINY = bench_command.Sizes(
    *(1, 16, 128, 2, 8, "float32"),
    ((gemm.GATHER, 64, 16, 64), (gemm.SCATTER, 64, 64, 16)),
    feature=(2, 4),
)


def bench(*arguments):
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    return bench_command.main(parser.parse_args(arguments))


@pytest.fixture
def tiny(monkeypatch):
    """Small sizes and few algorithms; compiling takes most of the time."""
    monkeypatch.setattr(bench_command, "sizes_for", lambda *_, **__: TINY)
    monkeypatch.setitem(attention._MATMUL, "cpu", 64)
    monkeypatch.setattr(attention, "CAUSAL", ("ring",))
    monkeypatch.setattr(attention, "PACKED", ("placed",))
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


def test_every_section_is_measured(tiny, capsys):
    code, said = bench("--json"), capsys.readouterr()
    assert "[3/3] measuring gemm" in said.err
    report = json.loads(said.out)
    assert (report["errors"], code) == ({}, 0)
    assert report["devices"].startswith("8 devices")
    rows = report["rows"]
    names = {(row["section"], row["what"]) for row in rows}
    assert {
        ("movement", movement.DONATED),
        ("movement", movement.SMALL_DISPATCH),
        ("attention", "placed, packed"),
        ("gemm", "all_gather_matmul, ring direct"),
    } <= names
    for row in rows:
        assert row["seconds"] > 0
        assert not row["of_limit"] or (row["limit"] and row["rate"] > 0)
        same = [x for x in rows if (x["section"], x["size"]) == (row["section"], row["size"])]
        if len(same) > 1:  # the alternative is among the rows
            assert any(x["speedup"] == pytest.approx(1) for x in same)


def test_a_wrong_result_is_an_error_and_the_other_sections_still_run(tiny, capsys, monkeypatch):
    monkeypatch.setattr(movement, "dispatch", lambda x, m, **options: x)
    assert bench("movement", "gemm") == 1
    printed = capsys.readouterr().out
    assert "Error: " in printed.split("gemm: ")[0]
    assert "all_gather_matmul, none" in printed and "of limit  speedup" in printed


@pytest.mark.parametrize("sizes", [bench_command.CPU, bench_command.QUICK, bench_command.GPU])
def test_sizes_suit_every_number_of_ranks(sizes):
    assert sizes.shared(8) == sizes
    odd = sizes.shared(6)
    assert all(x % 12 == 0 for x in (odd.tokens, *(x for _, *shape in odd.gemms for x in shape)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["attenton"], "no section is called attenton. Pass some of movement, attention, gemm"),
        (["--devices", "0"], "--devices is 0; pass 1 to 1024"),
        (["--devices", "9"], "--devices is 9 but JAX has 8 devices"),
    ],
)
def test_bad_arguments_give_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(bench_command, "start_cpu_devices", lambda count: None)
    assert bench(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("bench: ") and said.err.count("\n") == 1
