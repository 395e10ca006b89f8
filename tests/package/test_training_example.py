"""The training example: its loader, and a few steps compared with one device and resumed."""

import argparse
import dataclasses
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from in_ci import in_ci

for library in ("flax", "grain", "optax", "orbax.checkpoint"):
    pytest.importorskip(library, reason="the training example needs it: install the train extra")

from training import check  # noqa: E402
from training.data import DataConfig, make_loader  # noqa: E402
from training.model import ModelConfig  # noqa: E402
from training.state import Checkpoints  # noqa: E402

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def data(tmp_path):
    """A loader's configuration over random files, of which some are empty."""
    random = np.random.default_rng(0)
    folder = tmp_path / "documents"
    folder.mkdir()
    for number, size in enumerate(random.integers(0, 300, size=60)):
        text = random.choice([b"a", b"b c", b"\n\n", b"\n"], size=size)
        (folder / f"{number}.txt").write_bytes(b"".join(text))
    return DataConfig(folder=str(folder), pattern="*.txt", columns=64, workers=0)


def tokens_of(batch, data):
    """Returns (token, label, position) of each data group's tokens, sorted; without padding."""
    columns = batch["tokens"], batch["labels"], batch["documents"].positions
    groups = np.stack(columns, -1).reshape(data.data, -1, 3)
    used = (batch["documents"].segment_ids > 0).reshape(data.data, -1)
    return [sorted(map(tuple, group[i])) for group, i in zip(groups, used, strict=True)]


@pytest.mark.parametrize("order", ["zigzag", "placed"])
def test_orders_hold_the_same_documents(data, order):
    in_order = make_loader(dataclasses.replace(data, order="packed"))
    for batch, arranged, _ in zip(
        in_order, make_loader(dataclasses.replace(data, order=order)), range(4), strict=False
    ):
        assert tokens_of(batch, data) == tokens_of(arranged, data)
        ids, positions = batch["documents"].segment_ids, batch["documents"].positions
        follows = positions[:, 1:] > positions[:, :-1]
        np.testing.assert_array_equal(
            batch["labels"][:, :-1][follows], batch["tokens"][:, 1:][follows]
        )
        np.testing.assert_array_equal(batch["labels"] >= 0, ids > 0)
        assert (ids > 1).any()  # several documents in a row


def test_loader_continues_where_it_was_saved(data):
    loader, again = make_loader(data), make_loader(data)
    for _ in range(3):
        next(loader)
    again.set_state(loader.get_state())
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, next(loader), next(again))


@in_ci
def test_a_loader_in_processes_ends_clean(tmp_path):
    """Its last batch is in use until the end: shared memory would be reported as leaked."""
    (tmp_path / "documents.txt").write_text("a few words\n" * 500)
    config = f"folder={str(tmp_path)!r}, pattern='*.txt', columns=64, workers=1"
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "from training.data import DataConfig, make_loader\n\n"
        "def batches():\n"
        f"    loader = make_loader(DataConfig({config}))\n"
        "    return [next(loader) for _ in range(3)]\n\n"
        "if __name__ == '__main__':\n"
        "    kept = batches()\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stderr) == (0, "")


def test_folder_without_documents(data):
    with pytest.raises(ValueError, match="two bytes or more"):
        make_loader(dataclasses.replace(data, pattern="*.py"))


@in_ci
def test_steps_equal_one_device_and_resume_bit_by_bit(data, tmp_path):
    options = argparse.Namespace(algorithm="placed", rate=3e-3, seed=0)
    run = check.Comparison(options, ModelConfig(layers=2, width=32, hidden=64), data)
    run.run(2)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(2, run.state, run.loader)
    expected = [run.advance() for _ in range(2)]
    step, run.state = checkpoints.restore(run.state, run.loader)
    assert step == 2
    for metrics in expected:
        jax.tree.map(np.testing.assert_array_equal, run.advance(), metrics)
    with pytest.raises(FileExistsError, match="Pass --resume"):
        checkpoints.check_empty()
