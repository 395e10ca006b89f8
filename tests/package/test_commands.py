"""`python -m jax_cp_dispatch COMMAND`: what a user reads of demo, doctor and bench, exit codes.

And the versions of JAX that the package refuses.
"""

import json
import subprocess
import sys
from typing import Any

import jax
import mask_oracle
import numpy as np
import pytest
from attention_oracle import masked_attention, masked_attention_gradients
from in_ci import in_ci

from jax_cp_dispatch import (
    Availability,
    _cpu,  # inner: the version of its headers
    available_implementations,
)
from jax_cp_dispatch.__main__ import main
from jax_cp_dispatch._ranks import runtime  # inner: its checks of versions and libraries
from jax_cp_dispatch.tools import (  # inner: sizes that take seconds, and a broken machine
    bench,
    demo,
    doctor,
    programs,
)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command of this process; returns its exit code and what it says."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", *map(str, arguments)])
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr()

    return run


@pytest.fixture
def started(monkeypatch):
    """The numbers of devices that demo and bench start; JAX has some already."""
    counts = []
    for module in (demo, bench):
        monkeypatch.setattr(module, "start_cpu_devices", counts.append)
    return counts


# ---- All commands.


def test_a_full_output_gives_one_line(tmp_path):
    """Also when the process ends: Python flushes standard output once more."""
    (tmp_path / "lengths.json").write_text("[100, 200]")
    program = [sys.executable, "-m", "jax_cp_dispatch", "plan", "lengths.json"]
    with open("/dev/full", "w") as file:
        done = subprocess.run(
            program, cwd=tmp_path, stdout=file, stderr=subprocess.PIPE, text=True, timeout=1200
        )
    said = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    space = "cannot write the output: No space left on device. Free some space, or write elsewhere."
    assert (done.returncode, said) == (2, [f"plan: {space}"])


def test_the_help_names_the_launcher(command):
    code, said = command("--help")
    assert code == 0 and "python -m jax_cp_dispatch.launch runs a program" in said.out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("demo . --ranks 0", "argument --ranks: it is 0; pass 1 to 1024. See "),
        ("demo . --tokens-per-rank 9999999", "--tokens-per-rank is 9999999; pass 1 to 2097152."),
        ("demo . --picture nowhere/a.png", "--picture is nowhere/a.png; it needs to be a file in"),
        ("demo . --picture a.b", "--picture is a.b; it needs to be a file in an existing folder,"),
        ("demo nowhere", "nowhere is not a folder. Name one that holds text files."),
        ("demo .", ". has no text file. Name a folder that holds some."),
        ("doctor --devices 0", "argument --devices: it is 0; pass 1 to 1024. See "),
        ("doctor --devices 99999999", "argument --devices: it is 99999999; pass 1 to 1024. See "),
        ("bench attenton", "no section is called attenton. Pass some of movement, attention, gemm"),
        ("bench --devices 0.5", "argument --devices: invalid number value: '0.5'. See "),
        ("bench --devices 9", "--devices is 9 but JAX has 8 devices"),
    ],
)
@pytest.mark.usefixtures("started")
def test_bad_arguments_give_one_line(command, monkeypatch, tmp_path, arguments, message):
    """Beside the lines of progress."""
    monkeypatch.chdir(tmp_path)
    code, said = command(*arguments.split())
    assert code == 2 and not said.out
    (line,) = [x for x in said.err.splitlines(keepends=True) if not x.startswith("[")]
    assert line.startswith(f"{arguments.split()[0]}: {message}", line.find(arguments.split()[0]))


# ---- The demonstration.


@pytest.fixture
def folder(tmp_path):
    """Writes documents of many lengths, one binary and one empty."""
    rng = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for index, length in enumerate([3000, 700, 40, 900, 1500, 5, 0, 2200]):
        letters = rng.integers(32, 127, length).astype(np.uint8)
        (tmp_path / f"texts/{index}.txt").write_bytes(letters.tobytes())
    (tmp_path / "texts/binary.txt").write_bytes(b"\x00\xff\x00")
    return tmp_path / "texts"


def test_demo_is_right(command, started, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    sizes = "--ranks", 2, "--tokens-per-rank", 256
    code, said = command("demo", folder, *sizes, "--picture", "picture.svg")
    assert (code, started) == (0, [2])
    for text in (
        *("documents ", "tokens  ", "work before planning  max/mean"),
        *("work after planning   max/mean", "bytes moved", "time of planning"),
        *("time of attention", "largest difference    out ", "correct: the tolerance is"),
    ):
        assert text in said.out
    assert (folder.parent / "picture.svg").read_text().startswith("<?xml")
    assert "[6/6]" in said.err


def test_reading_skips_binary_files_and_has_a_fixed_order(folder):
    first = list(demo.read_texts(folder))
    assert sorted(map(len, first)) == [5, 40, 700, 900, 1500, 2200, 3000]
    assert list(demo.read_texts(folder)) == first


def documents(*lengths):
    return iter(bytes([n]) * n for n in lengths)


def test_packing_cuts_the_last_document_and_long_ones_and_pads():
    tokens, lengths = demo.pack(documents(50, 30, 90), num_tokens=120, longest=45)
    assert lengths == [45, 30, 45]
    np.testing.assert_array_equal(tokens[0], np.repeat([50, 30, 90], lengths))
    tokens, lengths = demo.pack(documents(5, 2), num_tokens=10, longest=10)
    assert lengths == [5, 2]
    np.testing.assert_array_equal(tokens[0], np.repeat([5, 2, 0], [5, 2, 3]))


def test_a_wrong_result_is_noticed():
    """Differences are relative to the largest entry; `jax.nn` itself is held to the oracle."""
    ids = np.repeat([[1, 2, 0]], [60, 20, 5], axis=1)
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=(1, 85, n, 8)).astype(np.float32) for n in (4, 2, 2, 4)]
    q, k, v, g = operands
    pairs = mask_oracle.batch_pairs("causal", ids)
    out, lse = masked_attention(q, k, v, pairs)
    right = [out, *masked_attention_gradients(q, k, v, pairs, g, np.zeros(lse.shape))]
    difference = lambda: demo.largest_difference([60, 20], operands, right)
    assert max(difference().values()) < 1e-5
    right[2][0, 7] *= 1.01
    wrong = difference()
    assert wrong.pop("dk") > 1e-4 and max(wrong.values()) < 1e-5


# ---- The doctor.


def test_doctor_reports_what_is_available_and_tests_every_transport(command, monkeypatch):
    tried = doctor.Finding("transport shared_memory", "right between 2 processes")
    monkeypatch.setattr(doctor, "try_processes", lambda: tried)
    code, said = command("doctor", "--json", "--devices", jax.device_count())
    reported = json.loads(said.out)
    assert code == 0 and reported["ok"]
    findings = {finding.pop("name"): finding for finding in reported["findings"]}
    assert jax.__version__ in findings["jax"]["found"]
    devices = {"found": "8 of cpu, 1 process(es)", "verdict": "ok", "remedy": ""}
    assert findings["devices"] == devices
    for name, implementation in available_implementations().items():
        says = "are correct on 8 ranks" if implementation.available else "the platform"
        if name == "shared_memory":
            says = tried.found
        assert says in findings[f"transport {name}"]["found"]
    for finding in findings.values():
        assert finding["verdict"] != "ok" or not finding["remedy"]


@in_ci
def test_doctor_tests_shared_memory_between_its_own_processes():
    found = doctor.try_processes()
    assert found.verdict == "ok" and "are correct between 2 processes" in found.found


@pytest.fixture
def only_transports(monkeypatch):
    """Leaves out the machine, and the processes that the doctor starts."""
    monkeypatch.setattr(doctor, "look_at_machine", lambda: ())
    monkeypatch.setattr(doctor, "try_processes", lambda: doctor.Finding("processes", "right"))


def test_a_transport_that_moves_nothing_is_wrong(command, only_transports, monkeypatch):
    move = doctor.dispatch
    monkeypatch.setattr(doctor, "dispatch", lambda *a, **options: 0 * move(*a, **options))
    code, said = command("doctor", "--devices", 8)
    assert code == 1 and "Something is wrong" in said.out
    assert "XX  transport in_process       dispatch returned the wrong rows" in said.out


def test_failures_and_missing_transports_are_reported(command, only_transports, monkeypatch):
    there = {"a": Availability(False, "no such processes"), "b": Availability(True, "")}
    monkeypatch.setattr(doctor, "available_implementations", lambda: there)
    code, said = command("doctor", "--json", "--devices", 8)
    first, second, _ = json.loads(said.out)["findings"]
    assert (first["found"], first["verdict"]) == ("no such processes", "missing")
    assert second["verdict"] == "wrong" and "implementation is 'b'" in second["found"]
    assert code == 1


def test_missing_devices_a_library_or_memory_name_their_remedy(monkeypatch):
    monkeypatch.setattr(doctor.jax, "devices", lambda: [][0])
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    monkeypatch.setattr(doctor, "version_of", lambda *names: None)
    monkeypatch.setattr(runtime, "cuda", None)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: None)
    usage = doctor.shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    found = {finding.name: finding for finding in doctor.look_at_machine()}
    for name, remedy in (
        ("GPU", "jax[cuda13]"),
        ("attention on GPUs", "Build the package with CUDA"),
        ("NVSHMEM", "nvidia-nvshmem-cu13"),
        ("shared memory", "--shm-size"),
        ("pictures", "[plots]"),
    ):
        assert found[name].verdict == "missing" and remedy in found[name].remedy
    _, says, verdict, remedy = found["devices"]
    assert (says[:12], verdict, remedy[:21]) == ("IndexError: ", "wrong", "Set JAX_PLATFORMS=cpu")


# ---- What import refuses.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"jax_version": "0.9.2"}, r"found jax 0.9.2 but needs jax>=0.10.2"),
        ({"jaxlib_version": "0.10.1"}, r"found jaxlib 0.10.1 but needs jaxlib>=0.10.2"),
        ({"built_ffi": (0, 6)}, r"built with XLA FFI headers 0.6 but jaxlib 0.12.0.1 offers 0.5"),
        ({"built_ffi": (1, 0)}, r"built with XLA FFI headers 1.0 but jaxlib"),
    ],
)
def test_unsupported_versions_are_rejected_at_import(change, message):
    good: dict[str, Any] = {"jax_version": "0.10.2", "jaxlib_version": "0.12.0.1"}
    good |= {"built_ffi": (0, 3), "installed_ffi": (0, 5)}
    runtime.check_versions(**good)
    runtime.check_versions(**{**good, "installed_ffi": None, "jax_version": "0.11.0.dev20260101"})
    with pytest.raises(ImportError, match=message):
        runtime.check_versions(**{**good, **change})


def test_built_with_the_oldest_supported_headers():
    """With newer headers, the CPU backend of an older jaxlib would not start."""
    assert _cpu.ffi_api_version() == (0, 3)


# ---- The bench.

TINY = bench.Sizes(
    *(1, 16, 128, 2, 8, 64, "float32"),
    ((programs.GATHER, 64, 16, 64), (programs.SCATTER, 64, 64, 16)),
    feature=(2, 4),
)


@pytest.fixture
def tiny(monkeypatch, started):
    """Small sizes and few algorithms; compiling takes most of the time."""
    monkeypatch.setattr(bench, "sizes_for", lambda *_, **__: TINY)
    monkeypatch.setattr(bench, "CAUSAL", ("ring",))
    monkeypatch.setattr(bench, "PACKED", ("placed",))


def test_every_section_is_measured(tiny, started, command):
    code, said = command("bench", "--json", "--devices", 2)
    assert "[3/3] measuring gemm" in said.err
    report = json.loads(said.out)
    assert (report["errors"], code, started) == ({}, 0, [2])
    assert report["devices"].startswith("2 devices")
    rows = report["rows"]
    assert {(row["section"], row["what"]) for row in rows} >= {
        ("movement", programs.DONATED),
        ("movement", bench.SMALL_DISPATCH),
        ("attention", "placed, packed"),
        ("gemm", "all_gather_matmul, ring direct"),
    }
    for row in rows:
        assert row["seconds"] > 0
        assert not row["of_limit"] or (row["limit"] and row["rate"] > 0)
        same = [x for x in rows if (x["section"], x["size"]) == (row["section"], row["size"])]
        if len(same) > 1:  # the alternative is among the rows
            assert any(x["speedup"] == pytest.approx(1) for x in same)


def test_a_wrong_result_is_an_error_and_the_other_sections_still_run(tiny, command, monkeypatch):
    monkeypatch.setattr(programs, "dispatch", lambda x, m, **options: x)
    code, said = command("bench", "movement", "gemm", "--devices", 2)
    assert code == 1 and "Error: " in said.out.split("gemm: ")[0]
    assert "all_gather_matmul, none" in said.out and "of limit  speedup" in said.out


def test_results_are_compared_bit_for_bit_or_to_a_tolerance():
    """Numbers that float32 cannot tell apart, and what is not a number."""
    ranks = programs.Ranks.of_devices(2, repeats=1)
    far = np.arange(8, dtype=np.int32) + 2**30
    ones = np.ones(8, np.float32)
    check = lambda a, b, limit: ranks.check_equal("x", ranks.put(a), ranks.put(b), limit)
    for a, b, tolerance in ((far, far, 0.0), (1.001 * ones, ones, 1e-2), (0 * ones, 0 * ones, 0.1)):
        check(a, b, tolerance)
    for a, b, tolerance in (
        (far + (np.arange(8) == 3), far, 0.0),
        (ones * 1.1, ones, 1e-2),
        (np.where(ones > np.arange(8), np.nan, 1), ones, 1e-2),
    ):
        with pytest.raises(ValueError, match=r"x differs from its alternative in [14] entries"):
            check(a.astype(b.dtype), b, tolerance)


def test_sizes_suit_every_number_of_ranks():
    for sizes in (bench.CPU, bench.QUICK, bench.GPU):
        assert sizes.shared(8) == sizes
        odd = sizes.shared(6)
        numbers = odd.tokens, *(x for _, *shape in odd.gemms for x in shape)
        assert all(x % 12 == 0 for x in numbers)
