"""A reader of docs/maxtext.md gets a running step from each program of the page."""

import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "maxtext.md"


@pytest.mark.parametrize("name", ["train_maxtext.py", "train_overlapped.py"])
def test_program(name, tmp_path):
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), flags=re.S)
    launchers = [text for kind, text in blocks if kind == "python"]
    commands = [text for kind, text in blocks if kind == "bash" and "train_" in text]
    index = next(i for i, text in enumerate(commands) if name in text)
    (tmp_path / name).write_text(launchers[index])
    command = commands[index].replace("maxtext-venv/bin/python", sys.executable)
    command = command.replace("/tmp/maxtext", str(tmp_path / "out"))
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"completed step: 4.*loss: \d", said), said
    assert "UserWarning: jax_cp_dispatch" not in said, said
