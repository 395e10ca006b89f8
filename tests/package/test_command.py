"""What all commands share: how they end if their output cannot be written, and their help."""

import subprocess
import sys

import pytest

from jax_cp_dispatch.__main__ import main
from jax_cp_dispatch.bench_command import run as bench

pytestmark = pytest.mark.usefixtures("environment_of_a_user")

QUICK = {
    "bench": ["planning", "--quick", "--devices", "2"],
    "demo": [".", "--ranks", "2", "--tokens-per-rank", "32"],
    "doctor": ["--devices", "2"],
    "plan": ["lengths.json", "--json"],
}


def run(command, folder, output):
    (folder / "lengths.json").write_text("[100, 200]")
    with open(output, "w") as file:
        return subprocess.run(
            [sys.executable, "-m", "jax_cp_dispatch", command, *QUICK[command]],
            cwd=folder,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            timeout=1200,
        )


@pytest.mark.parametrize("command", QUICK)
def test_a_full_output_gives_one_line(command, tmp_path):
    done = run(command, tmp_path, "/dev/full")
    said = [line for line in done.stderr.splitlines() if not line.startswith("[")]  # progress
    space = "cannot write the output: No space left on device. Free some space, or write elsewhere."
    assert (done.returncode, said) == (2, [f"{command}: {space}"])


def test_a_quick_bench_says_what_it_does_not_show(tmp_path):
    assert run("bench", tmp_path, tmp_path / "said").returncode == 0
    said = (tmp_path / "said").read_text().replace("\n", " ")
    assert "too small to show the gain of context parallelism" in said
    assert bench.QUICK_SAYS in said


def test_the_help_names_the_launcher(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "python -m jax_cp_dispatch.launch runs a program" in capsys.readouterr().out
