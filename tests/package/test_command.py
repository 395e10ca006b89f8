"""What all commands share: how they end if their output cannot be written, and their help."""

import subprocess
import sys

import jax
import pytest

from jax_cp_dispatch.__main__ import main

RANKS = str(jax.device_count())
QUICK = {
    "bench": ["movement", "--quick", "--devices", RANKS],
    "demo": [".", "--ranks", RANKS, "--tokens-per-rank", "32"],
    "doctor": ["--devices", RANKS],
    "plan": ["lengths.json"],
}
SPACE = "cannot write the output: No space left on device. Free some space, or write elsewhere."


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command in this process and returns its status; the arguments say where it writes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.json").write_text("[100, 200]")

    def of(command, output):
        monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", command, *QUICK[command]])
        with open(output, "w") as file:
            monkeypatch.setattr("sys.stdout", file)
            return main()

    return of


def apart_from_progress(text):
    return [line for line in text.splitlines() if not line.startswith("[")]


@pytest.mark.parametrize("command", QUICK)
def test_a_full_output_gives_one_line(run, capsys, command):
    status = run(command, "/dev/full")
    assert (status, apart_from_progress(capsys.readouterr().err)) == (2, [f"{command}: {SPACE}"])


def test_nothing_else_is_said_when_the_process_ends(tmp_path):
    """Python flushes standard output once more."""
    (tmp_path / "lengths.json").write_text("[100, 200]")
    program = [sys.executable, "-m", "jax_cp_dispatch", "plan", *QUICK["plan"]]
    with open("/dev/full", "w") as file:
        done = subprocess.run(
            program, cwd=tmp_path, stdout=file, stderr=subprocess.PIPE, text=True, timeout=1200
        )
    assert (done.returncode, apart_from_progress(done.stderr)) == (2, [f"plan: {SPACE}"])


def test_the_help_names_the_launcher(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "python -m jax_cp_dispatch.launch runs a program" in capsys.readouterr().out
