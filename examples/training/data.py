"""A Grain loader of packed documents. Its workers pack, shift labels, plan and permute.

The workers use NumPy only; they start no JAX backend. The position of the iterator can be saved and
restored at any step.
"""

import dataclasses
import fnmatch
import itertools
import multiprocessing
import os
import pathlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import absl.flags
import grain
import jax
import numpy as np

import jax_cp_dispatch as cpd


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What the loader reads and returns.

    Attributes:
      folder, pattern: the files, also in subfolders, but not in "test", "tests" and
        "site-packages"; None is the source of Python's standard library.
      batch, columns: the shape of a batch, B x T. Longer documents are cut.
      max_documents: per batch row.
      order: of the tokens; "packed", "zigzag" or "placed".
      data, context: sizes of these mesh axes. B is split over data.
      workers: processes; 0 loads in this process.
    """

    folder: str | None = None
    pattern: str = "*.py"
    batch: int = 4
    columns: int = 2048
    max_documents: int = 64
    order: str = "placed"
    data: int = 2
    context: int = 2
    workers: int = 2
    seed: int = 0


class Parts:
    """The top-level parts of all files: a part begins at an unindented line after an empty one.

    Of source code these are definitions, of prose paragraphs. Parts with more than `columns` labels
    are cut. Their places are found once; a part is read when asked for.
    """

    def __init__(self, config: DataConfig):
        folder = config.folder or os.path.dirname(os.__file__)
        self.places: list[tuple[str, int, int]] = []  # file, first byte, number of labels
        for path in _files(folder, config.pattern):
            text = path.read_bytes()
            begins = [0, *(match.end() for match in re.finditer(rb"\n\n+(?=\S)", text))]
            for begin, end in itertools.pairwise([*begins, len(text)]):
                for start in range(begin, end - 1, config.columns):
                    labels = min(config.columns, end - 1 - start)
                    self.places.append((str(path), start, labels))
        if not self.places:
            raise ValueError(f"{folder} has no files {config.pattern!r} with two bytes or more.")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        path, start, labels = self.places[index]
        with open(path, "rb") as file:
            file.seek(start)
            text = np.frombuffer(file.read(labels + 1), np.uint8).astype(np.int32)
        # Labels are shifted here, within the document, before anything changes the order.
        return {"tokens": text[:-1], "labels": text[1:]}


def _files(folder: str, pattern: str) -> Iterator[pathlib.Path]:
    """Lists files in an order that is the same on every machine."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - {"site-packages", "test", "tests"})
        yield from (pathlib.Path(root, name) for name in sorted(fnmatch.filter(names, pattern)))


def pairs_per_device(documents: cpd.Documents, data: int, context: int) -> Any:
    """Returns the query-key pairs of the tokens of each device, [data, context]; NumPy or JAX."""
    pairs = (documents.positions + 1) * (documents.segment_ids > 0)
    return pairs.reshape(data, -1, context, pairs.shape[1] // context).sum((1, 3))


def imbalance(pairs: Any) -> Any:
    """Returns the largest work of a device divided by the mean of its group, [data, context]."""
    return (pairs / pairs.mean(1, keepdims=True)).max()


def set_up_worker(worker: int, num_workers: int) -> None:
    """Makes an error of any use of JAX, and ends the worker when the training process ends.

    Otherwise a worker could take memory of an accelerator, or outlive a run that was killed.
    """
    jax.config.update("jax_platforms", "none_in_a_worker_of_the_loader")
    trainer = multiprocessing.parent_process()

    def end_with_trainer() -> None:
        if trainer is not None:
            trainer.join()
            os._exit(1)

    threading.Thread(target=end_with_trainer, daemon=True).start()


@dataclasses.dataclass(frozen=True)
class Arrange:
    """Puts the tokens of a packed batch into the order that the algorithm needs."""

    config: DataConfig

    def __call__(self, element: dict[str, np.ndarray]) -> dict[str, Any]:
        batch = {name: element[name] for name in ("tokens", "labels")}
        documents = cpd.Documents(element["tokens_segment_ids"], element["tokens_positions"])
        # Compared in the step: an array in another order, or of another batch, ends the run.
        checksums = cpd.sequence.token_checksums(batch, documents=documents)
        in_order = imbalance(pairs_per_device(documents, self.config.data, self.config.context))
        if self.config.order == "zigzag":
            documents = documents.zigzag(self.config.context)
            batch = documents.apply(batch)
        if self.config.order == "placed":
            placement = self._place(documents)
            documents, batch = placement.documents, placement.apply(batch)
        others = {"checksums": checksums, "imbalance_in_order": in_order}
        return batch | {"documents": documents} | others

    def _place(self, documents: cpd.Documents) -> cpd.Placement:
        """Places the rows of each data group on its ranks."""
        rows = self.config.batch // self.config.data
        # Fixed sizes: all batches use one compiled program. Every rank has room for all keys.
        pieces = 2 * rows * self.config.max_documents
        sizes = cpd.PlanConfig(
            kv_capacity=rows * self.config.columns,
            max_kv_transfers=pieces,
            max_pieces=pieces,
            max_cut_pieces=pieces,
            max_linked_pieces=self.config.context * pieces,
        )
        return cpd.place_tokens(
            segment_ids=documents.segment_ids,
            positions=documents.positions,
            world_size=self.config.context,
            num_groups=self.config.data,
            config=sizes,
        )


def make_loader(config: DataConfig) -> grain.DatasetIterator:
    """Returns an endless iterator of batches, the same in every run; see `Arrange` for a batch."""
    documents = grain.MapDataset.source(Parts(config)).seed(config.seed).shuffle().repeat()
    packed = grain.experimental.FirstFitPackIterDataset(
        documents.to_iter_dataset(),
        length_struct={"tokens": config.columns, "labels": config.columns},
        padding_struct={"tokens": 0, "labels": -1},
        num_packing_bins=4 * config.batch,
        max_sequences_per_bin=config.max_documents,
        seed=config.seed,
    )
    batches = packed.batch(config.batch, drop_remainder=True).map(Arrange(config))
    if config.workers:
        absl.flags.FLAGS.mark_as_parsed()  # Grain reads its flags when it starts workers
        # Grain's shared memory would outlive the run: it is freed by a thread, after its last use.
        copied = grain.experimental.DatasetOptions(min_shm_size=1 << 30)
        batches = grain.experimental.WithOptionsIterDataset(batches, copied)
        options = grain.MultiprocessingOptions(config.workers, per_worker_buffer_size=2)
        batches = batches.mp_prefetch(options, worker_init_fn=set_up_worker)
    return iter(batches)
