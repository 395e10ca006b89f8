"""Runs MaxText's own training loop on packed documents; watches what the adapters call."""

import contextlib
import json
import pathlib
import tempfile
from typing import Any
from unittest import mock

import jax
import numpy as np
from maxtext.input_pipeline.synthetic_data_processing import SyntheticDataIterator  # pyright: ignore
from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]
from maxtext.utils import sharding  # pyright: ignore[reportMissingImports]

import jax_cp_dispatch as cpd
from jax_cp_dispatch._text import say_once  # inner: each run says its warnings again
from jax_cp_dispatch.adapters import maxtext  # inner: whether the adapters call the package

ATTENTION = "context_parallel_attention"
STEPS = 50
TOLERANCE = 1e-5  # of float32 losses of about 4, after 50 steps
DEADLINE = 600  # seconds, for a machine that has other work to do

OPTIONS: dict[str, Any] = {
    **{"run_name": "test", "hardware": "cpu", "skip_jax_distributed_system": True},
    **{"enable_checkpointing": False, "log_config": False, "dataset_type": "synthetic"},
    **{"packing": True, "attention": "dot_product", "dtype": "float32", "learning_rate": 1e-3},
    # A model of two layers, and 64 tokens in each of 8 rows.
    **{"base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 8},
    **{"base_mlp_dim": 64, "base_num_decoder_layers": 2, "vocab_size": 64},
    **{"max_target_length": 64, "per_device_batch_size": 1},
}


def packed_batch(random: np.random.Generator, rows: int, columns: int, vocab_size: int):
    """Documents of arithmetic progressions, which can be learned, and padding."""
    names = ("inputs", "inputs_position", "inputs_segmentation")
    batch = {name: np.zeros((rows, columns), np.int32) for name in names}
    for row in range(rows):
        start, document = 0, 1
        while (length := int(random.integers(2, columns // 2))) <= columns - 3 - start:
            place = row, slice(start, start + length)
            first, steps = random.integers(vocab_size), np.arange(length)
            batch["inputs"][place] = 1 + (first + 3 * steps) % (vocab_size - 1)
            batch["inputs_position"][place] = steps
            batch["inputs_segmentation"][place] = document
            start, document = start + length, document + 1
    ids = batch["inputs_segmentation"]
    is_last = np.append(ids[:, 1:] != ids[:, :-1], np.ones((rows, 1), bool), axis=1)
    targets = np.where(is_last, 0, np.roll(batch["inputs"], -1, axis=1))
    return batch | {
        "targets": targets,
        "targets_position": batch["inputs_position"],
        "targets_segmentation": np.where(is_last, 0, ids),
    }


class PackedIterator:
    """Takes the place of `SyntheticDataIterator`, whose batches are all the same."""

    def __init__(self, config, mesh):
        self.sharding = sharding.get_input_data_sharding(config, mesh)
        self.sizes = config.global_batch_size_to_load, config.max_target_length, config.vocab_size
        self.reset()

    def __next__(self):
        return jax.device_put(packed_batch(self.random, *self.sizes), self.sharding)

    def reset(self):
        self.random = np.random.default_rng(0)


def losses(steps: int, adapter: Any = None, **options: Any) -> np.ndarray:
    """Trains a model from its first parameters, in `adapter`; returns the loss of each step."""
    methods = {name: getattr(PackedIterator, name) for name in ("__init__", "__next__", "reset")}
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics"
        options = {**OPTIONS, **options, "steps": steps}
        options |= {"base_output_directory": folder, "metrics_file": str(metrics)}
        say = lambda value: value if isinstance(value, str) else json.dumps(value)
        arguments = [f"{name}={say(value)}" for name, value in options.items()]
        with (
            mock.patch.multiple(SyntheticDataIterator, **methods),
            adapter or contextlib.nullcontext(),
        ):
            train.main(["train", *arguments])
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) == steps
    return np.array([line["learning/loss"] for line in lines])


@contextlib.contextmanager
def watched(*names: str) -> Any:
    """Watches functions of the package that the adapters call; by default attention alone.

    They are replaced by mocks that call them; the value is that of the first, or of all by name.
    """
    mocks = {name: mock.Mock(wraps=getattr(cpd, name)) for name in names or (ATTENTION,)}
    with mock.patch.multiple(maxtext, **mocks):
        yield mocks if names else mocks[ATTENTION]


def without_overlap(multiply: Any) -> Any:
    """Returns a patch that multiplies with this function in place of the adapter's."""
    return mock.patch.object(maxtext, "multiply", multiply)


def warn_again() -> None:
    say_once.cache_clear()
