"""What all commands share: how they end if their output cannot be written, and their help."""

import subprocess
import sys

import pytest

from jax_cp_dispatch.__main__ import main


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


def test_the_help_names_the_launcher(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "python -m jax_cp_dispatch.launch runs a program" in capsys.readouterr().out
