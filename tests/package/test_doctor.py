"""The doctor reports what is available, tests every transport, and reports a faulty one."""

import argparse
import json

import jax
import pytest

from jax_cp_dispatch import Availability, available_implementations, doctor
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch.doctor import machine, self_test
from jax_cp_dispatch.doctor.machine import Finding


def report(capsys, *, is_json=True):
    code = doctor.main(argparse.Namespace(json=is_json, devices=jax.device_count()))
    printed = capsys.readouterr().out
    return code, json.loads(printed) if is_json else printed


def test_reports_what_is_available_and_tests_every_transport(capsys):
    code, reported = report(capsys)
    assert code == 0 and reported["ok"]
    findings = {finding.pop("name"): finding for finding in reported["findings"]}
    assert jax.__version__ in findings["jax"]["found"]
    assert findings["devices"] == {
        "found": "8 of cpu, 1 process(es)",
        "verdict": "ok",
        "remedy": "",
    }
    for name, implementation in available_implementations().items():
        found = findings[f"transport {name}"]["found"]
        if name == "shared_memory":  # starts its own processes
            assert "are correct between 2 processes" in found
        else:
            assert (
                "are correct on 8 ranks" if implementation.available else "the platform"
            ) in found
    for finding in findings.values():
        assert finding["verdict"] != "ok" or not finding["remedy"]


def test_a_transport_that_moves_nothing_is_wrong(capsys, monkeypatch):
    move = self_test.dispatch
    monkeypatch.setattr(doctor, "look_at_machine", lambda: ())
    monkeypatch.setattr(doctor, "try_processes", lambda: Finding("transport of processes", "right"))
    monkeypatch.setattr(self_test, "dispatch", lambda *a, **options: 0 * move(*a, **options))
    code, reported = report(capsys, is_json=False)
    assert code == 1
    assert "XX  transport in_process       dispatch returned the wrong rows" in reported
    assert "Something is wrong" in reported


def test_failures_and_missing_transports_are_reported(capsys, monkeypatch):
    there = {"a": Availability(False, "no such processes"), "b": Availability(True, "")}
    monkeypatch.setattr(doctor, "look_at_machine", lambda: ())
    monkeypatch.setattr(doctor, "try_processes", lambda: Finding("transport of processes", "right"))
    monkeypatch.setattr(self_test, "available_implementations", lambda: there)
    code, reported = report(capsys)
    first, second, _ = reported["findings"]
    assert (first["found"], first["verdict"]) == ("no such processes", "missing")
    assert second["verdict"] == "wrong" and "implementation is 'b'" in second["found"]
    assert code == 1


def test_a_missing_gpu_library_or_memory_names_its_remedy(monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "_find_version", lambda *names: None)
    monkeypatch.setattr(runtime, "cuda", None)
    monkeypatch.setattr(machine.ctypes.util, "find_library", lambda name: None)
    usage = machine.shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    found = {finding.name: finding for finding in machine.look_at_machine()}
    for name, remedy in (
        ("GPU", "jax[cuda13]"),
        ("attention on GPUs", "Build the package with CUDA"),
        ("NVSHMEM", "nvidia-nvshmem-cu13"),
        ("shared memory", "--shm-size"),
        ("pictures", "[plots]"),
    ):
        assert found[name].verdict == "missing" and remedy in found[name].remedy


@pytest.mark.parametrize("devices", [0, 99999999])
def test_number_of_devices_is_checked(capsys, devices):
    assert doctor.main(argparse.Namespace(json=True, devices=devices)) == 2
    assert capsys.readouterr().err == f"doctor: --devices is {devices}; pass 1 to 1024.\n"
