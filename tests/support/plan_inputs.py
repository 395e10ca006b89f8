"""Files that the plan command reads, and those that it refuses."""

import argparse
import json

import numpy as np

from jax_cp_dispatch.plan_command.run import add_arguments, main

ROWS = [[700, 200], [50] * 18]


def run(*arguments):
    """Runs the command with these arguments."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(x) for x in arguments]))


def write_inputs(folder):
    files = {
        "list.json": "[700, 200, 50]",
        "rows.json": json.dumps(ROWS),
        "marked.json": "\ufeff[700, 200, 50.0]",
        "huge.json": "[1e10]",
        "long.json": "[3e9, 5]",
        "negative.json": "[5, -1]",
        "fraction.json": "[5, 1.5]",
        "mixed.json": "[5, [6]]",
        "broken.json": "[5,",
        "deep.json": "[" * 100_000,
        "text.json": '["100"]',
        "digits.json": f"[{'9' * 5000}]",
        "object.json": '{"lengths": [700]}',
        "empty.json": "[0, 0]",
        "lengths.csv": "700,200",
        "text.npy": "[700]",
        "text.npz": "[700]",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "binary.json").write_bytes(b"\xff\x00")
    ids = ids_of(ROWS)
    np.save(folder / "one.npy", ids[0])
    np.save(folder / "ids.npy", ids)
    np.savez(folder / "ids.npz", segment_ids=ids)
    positions = np.concatenate([np.arange(x) for x in (700, 200)])[None]
    np.savez(folder / "positions.npz", segment_ids=positions * 0 + 1, positions=positions)
    np.savez(folder / "other.npz", ids=ids, tokens=ids)
    np.savez(folder / "masks.npz", segment_ids=ids, **mask_arrays(ids))
    np.savez(folder / "padding.npz", segment_ids=[0, 1], in_prefix=[True, True])
    np.save(folder / "floats.npy", ids / 2)
    np.save(folder / "cube.npy", ids[None])
    np.save(folder / "twice.npy", np.array([1, 2, 1]))
    np.save(folder / "objects.npy", np.array([{}]), allow_pickle=True)


def ids_of(rows):
    """Segment ids of documents that follow each other; the rest of a row is padding."""
    ids = np.zeros((len(rows), max(map(sum, rows))), np.int32)
    for row, lengths in enumerate(rows):
        ids[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids


def mask_arrays(ids):
    """Arrays of every mask of arrays, for ids of documents."""
    half = np.arange(ids.shape[1]) % 40 < 20
    column = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    first = np.maximum.accumulate(np.where(np.diff(ids, axis=1, prepend=-1) != 0, column, 0), 1)
    return {
        "in_prefix": half & (np.diff(ids, axis=1, prepend=0) != 0),
        "block_ids": half * ids,
        "completion_ids": np.where(column - first < 20, 0, ids),  # after a prompt
        "span_ids": np.where(ids == 0, -1, ids - 1),
        "parents": np.full((len(ids), 18), -1),
        "k_start": column - 5,
        "k_end": column + 9,
    }
