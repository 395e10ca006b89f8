"""Every example completes in a process and verifies its own result; parts of the training example.

Compiled as for a user.
"""

import argparse
import dataclasses
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from in_ci import in_ci

FOLDER = pathlib.Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))

# A short run. Another test compares training with one device.
TRAIN = ["--steps=3", "--columns=128", "--layers=1", "--workers=1"]


def runs(*program):
    done = subprocess.run(
        [sys.executable, *map(str, program)], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return done


@in_ci
@pytest.mark.usefixtures("environment_of_a_user")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path, tmp_path):
    arguments = []
    if path.name == "07_train.py":
        pytest.importorskip("grain", reason="the training example needs the train extra")
        arguments = [*TRAIN, "--folder", FOLDER, "--out", tmp_path]
    assert "verified" in runs(path, *arguments).stdout


def test_examples_are_short_and_listed():
    text = (FOLDER / "README.md").read_text()
    assert re.findall(r"\]\((\w+\.py)\)", text) == [path.name for path in EXAMPLES]
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 120, path.name


# ---- The training example: its loader, and a few steps compared with one device and resumed.


@pytest.fixture
def training(tmp_path):
    """Returns its modules, and a loader's configuration over random files; some are empty."""
    for library in ("flax", "grain", "optax", "orbax.checkpoint"):
        pytest.importorskip(library, reason="the training example needs the train extra")
    from training import check, data, model, state

    random = np.random.default_rng(0)
    folder = tmp_path / "documents"
    folder.mkdir()
    for number, size in enumerate(random.integers(0, 300, size=60)):
        text = random.choice([b"a", b"b c", b"\n\n", b"\n"], size=size)
        (folder / f"{number}.txt").write_bytes(b"".join(text))
    config = data.DataConfig(folder=str(folder), pattern="*.txt", columns=64, workers=0)
    return argparse.Namespace(check=check, data=data, model=model, state=state, config=config)


def tokens_of(batch, config):
    """Returns (token, label, position) of each data group's tokens, sorted; without padding."""
    columns = batch["tokens"], batch["labels"], batch["documents"].positions
    groups = np.stack(columns, -1).reshape(config.data, -1, 3)
    used = (batch["documents"].segment_ids > 0).reshape(config.data, -1)
    return [sorted(map(tuple, group[i])) for group, i in zip(groups, used, strict=True)]


@in_ci
def test_orders_hold_the_same_documents(training):
    of_order = lambda order: dataclasses.replace(training.config, order=order)
    loaders = [training.data.make_loader(of_order(x)) for x in ("packed", "zigzag", "placed")]
    for _, batch, *arranged in zip(range(3), *loaders, strict=False):
        for other in arranged:
            assert tokens_of(batch, training.config) == tokens_of(other, training.config)
        ids, positions = batch["documents"].segment_ids, batch["documents"].positions
        follows = positions[:, 1:] > positions[:, :-1]
        labels, tokens = batch["labels"], batch["tokens"]
        np.testing.assert_array_equal(labels[:, :-1][follows], tokens[:, 1:][follows])
        np.testing.assert_array_equal(labels >= 0, ids > 0)
        assert (ids > 1).any()  # several documents in a row
    with pytest.raises(ValueError, match="two bytes or more"):
        training.data.make_loader(dataclasses.replace(training.config, pattern="*.py"))


@in_ci
def test_a_loader_in_processes_ends_clean(training, tmp_path):
    """Its last batch is in use until the end: shared memory would be reported as leaked."""
    program = tmp_path / "program.py"
    program.write_text(f"""\
import sys
sys.path.insert(0, {str(FOLDER)!r})
from training.data import DataConfig, make_loader

def batches():
    loader = make_loader({dataclasses.replace(training.config, workers=1)!r})
    return [next(loader) for _ in range(3)]

if __name__ == '__main__':
    kept = batches()
""")
    assert not runs(program).stderr


@in_ci
def test_steps_equal_one_device_and_resume_bit_by_bit(training, tmp_path):
    options = argparse.Namespace(algorithm="placed", rate=3e-3, seed=0)
    config = training.model.ModelConfig(layers=2, width=32, hidden=64)
    run = training.check.Comparison(options, config, training.config)
    run.run(2)
    checkpoints = training.state.Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(2, run.state, run.loader)
    expected = [run.advance() for _ in range(2)]
    step, run.state = checkpoints.restore(run.state, run.loader)
    assert step == 2
    for metrics in expected:
        jax.tree.map(np.testing.assert_array_equal, run.advance(), metrics)
    with pytest.raises(FileExistsError, match="Pass --resume"):
        checkpoints.check_empty()
