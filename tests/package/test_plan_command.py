"""The plan command: every form of input, numbers that agree with their sources, helpful errors."""

import argparse
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jax_cp_dispatch import (
    PlacementConfig,
    PlanConfig,
    choose_algorithm,
    place_tokens,
    plan_attention,
)
from jax_cp_dispatch.__main__ import main as command
from jax_cp_dispatch.cost import HARDWARE
from jax_cp_dispatch.masks import BlockCausal, Blocks, PrefixLM, Ranges, SharedPrefix, Tree
from jax_cp_dispatch.plan_command.batch import fill_ranks
from jax_cp_dispatch.plan_command.lengths import Lengths, read_lengths
from jax_cp_dispatch.plan_command.run import add_arguments, main

ROOT = pathlib.Path(__file__).parents[2]
ROWS = [[700, 200], [50] * 18]


def run(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(x) for x in arguments]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "binary.json").write_bytes(b"\xff\x00")
    ids = ids_of(ROWS)
    np.save(tmp_path / "one.npy", ids[0])
    np.save(tmp_path / "ids.npy", ids)
    np.savez(tmp_path / "ids.npz", segment_ids=ids)
    positions = np.concatenate([np.arange(x) for x in (700, 200)])[None]
    np.savez(tmp_path / "positions.npz", segment_ids=positions * 0 + 1, positions=positions)
    np.savez(tmp_path / "other.npz", ids=ids, tokens=ids)
    np.savez(tmp_path / "masks.npz", segment_ids=ids, **mask_arrays(ids))
    np.savez(tmp_path / "padding.npz", segment_ids=[0, 1], in_prefix=[True, True])
    np.save(tmp_path / "floats.npy", ids / 2)
    np.save(tmp_path / "cube.npy", ids[None])
    np.save(tmp_path / "twice.npy", np.array([1, 2, 1]))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    return tmp_path


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
    return {
        "in_prefix": half & (np.diff(ids, axis=1, prepend=0) != 0),
        "block_ids": half * ids,
        "completion_ids": np.where(half, 0, ids),
        "span_ids": np.where(ids == 0, -1, ids - 1),
        "parents": np.full((len(ids), 18), -1),
        "k_start": column - 5,
        "k_end": column + 9,
    }


@pytest.mark.parametrize(
    "name, expected",
    [
        ("list.json", [[700, 200, 50]]),
        ("marked.json", [[700, 200, 50]]),
        ("rows.json", ROWS),
        ("one.npy", ROWS[:1]),
        ("ids.npy", ROWS),
        ("ids.npz", ROWS),
        ("positions.npz", ROWS[:1]),
    ],
)
def test_every_form_of_input(folder, name, expected):
    assert [row.lengths for row in read_lengths(folder / name).rows] == expected


@pytest.mark.parametrize(
    "name, options, understood",
    [
        ("list.json", {}, "list.json: a list of 3 lengths. Taken as one batch row."),
        ("rows.json", {"row": 1}, "rows.json: 2 lists of lengths. Taken as row 1 of 2, alone."),
        ("rows.json", {"join": True}, "2 lists of lengths. Taken as one batch row."),
        ("rows.json", {}, "Taken as 2 rows of one batch, planned together. If they are separate"),
        ("ids.npy", {}, "ids.npy: segment ids of 20 documents. Taken as 2 rows of one batch"),
        ("one.npy", {}, "one.npy: segment ids of 2 documents. Taken as one batch row."),
    ],
)
def test_what_was_understood(folder, name, options, understood):
    """A list of separate batches looks like the rows of one batch; only the user knows."""
    found = read_lengths(folder / name, **options)
    assert understood in found.understood
    if "row" in options:
        assert [row.lengths for row in found.rows] == [ROWS[1]]


def test_documents_are_named_by_their_place_in_a_file(folder):
    for name, row, index, place in (
        ("list.json", 0, 1, "item 1"),
        ("rows.json", 1, 3, "list 1 item 3"),
        ("ids.npz", 1, 3, "row 1 document 3"),
    ):
        rows = read_lengths(folder / name).rows
        assert rows[row].name(index) == f"{folder / name} {place}"
    (joined,) = read_lengths(folder / "rows.json", join=True).rows
    assert joined.lengths == [*ROWS[0], *ROWS[1]]
    assert joined.name(5) == f"{folder / 'rows.json'} list 1 item 3"


def test_a_reader_that_stops_early_is_no_error(folder):
    command = [sys.executable, "-m", "jax_cp_dispatch", "plan", "rows.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 0 and "Error" not in said


def test_filling_ranks_cuts_one_document_per_row():
    rows = [Lengths(x, "item {}".format) for x in ([10, 10, 0, 10, 0, 10], [7])]
    batch = fill_ranks(rows, num_ranks=3, tokens_per_rank=8)
    assert batch.rows == ((10, 10, 4), (7,))
    assert (batch.num_cut, batch.num_left_out) == (1, 1)
    assert batch.name(0, 2) == "item 3"  # empty documents keep their numbers
    assert fill_ranks(rows, num_ranks=3, tokens_per_rank=None).tokens_per_rank == 14


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "cannot read nowhere: its suffix is ''. Pass lengths in a .json file, or"),
        (["no.json"], "cannot read no.json: No such file or directory. Pass a .json, .npy or .npz"),
        (["no.npz"], "cannot read no.npz: No such file or directory"),
        (["lengths.csv"], "cannot read lengths.csv: its suffix is '.csv'. Pass lengths in"),
        (["text.npy"], "text.npy holds no arrays of NumPy: "),
        (["text.npz"], "text.npz holds no arrays of NumPy: "),
        (["objects.npy"], "objects.npy holds no arrays of NumPy: Object arrays cannot be loaded"),
        (["other.npz"], "has no array 'segment_ids'; it has ids, tokens. Save the segment ids as"),
        (["floats.npy"], "floats.npy holds float64 of shape (2, 900); it needs integer segment"),
        (["cube.npy"], "cube.npy holds int32 of shape (1, 2, 900); it needs integer segment ids"),
        (["twice.npy"], "twice.npy: document_lengths: "),
        (["negative.json"], "negative.json item 1 is -1; it needs a whole number"),
        (["fraction.json"], "fraction.json item 1 is 1.5; it needs a whole number"),
        (["mixed.json"], "needs a list of lengths, such as"),
        (["broken.json"], "broken.json is not JSON: Expecting value"),
        (["object.json"], "object.json needs a list of lengths, such as"),
        (["binary.json"], "binary.json is not JSON: 'utf-8' codec can't decode"),
        (["empty.json"], "empty.json has no documents with tokens"),
        (["list.json", "--ranks", "8,x"], "--ranks is '8,x'; pass one number, or several"),
        (["list.json", "--ranks", "12"], "12 ranks do not fill h100 nodes of 8. Pass --nodes"),
        (["list.json", "--nodes", "3"], "--nodes 3 does not divide 8 ranks"),
        (["list.json", "--nodes", "2", "--hardware", "cpu"], "has no links between nodes"),
        (
            ["list.json", "--mask", "bidirectional"],
            "pass one of causal, full, sliding_window:TOKENS",
        ),
        (["list.json", "--mask", "tree"], "--mask tree needs the arrays segment_ids, span_ids, "),
        (["ids.npz", "--mask", "blocks"], "ids.npz has no block_ids. Save them in one .npz file"),
        (["padding.npz", "--mask", "prefix_lm"], "padding.npz has padding before a document"),
        (["masks.npz", "--mask", "blocks", "--join"], "got --join and --mask blocks"),
        (["list.json", "--mask", "chunked:0"], "--mask is 'chunked:0'; pass one of"),
        (["list.json", "--mask", "chunked:1" + "0" * 23], "--mask is 'chunked:1000000000"),
        (["list.json", "--head-size", "1" + "0" * 23], "--head-size is 1000000000"),
        (["list.json", "--heads", "1" + "0" * 23], "pass 1 to 65536"),
        (["list.json", "--itemsize", "32"], "--itemsize is 32; pass 1 to 16"),
        (["deep.json"], "deep.json has lists inside lists that are too deep to read"),
        (
            ["text.json"],
            "text.json item 0 is '100'; it needs a whole number of tokens",
        ),
        (["digits.json"], "digits.json is not JSON: Exceeds the limit (4300 digits)"),
        (["list.json", "--kv-heads", "3"], "--heads 32 is not a multiple of --kv-heads 3"),
        (["list.json", "--pictures", "list.json"], "cannot create the folder list.json"),
        (["rows.json", "--row", "2"], "--row is 2, but the file has rows 0 to 1. Pass one"),
        (["list.json", "--row", "-1"], "--row is -1, but the file has only row 0"),
        (["list.json", "--ranks", "99999"], "so pass at most 16384"),
        (["huge.json", "--ranks", "2", "--hardware", "cpu"], "rank would hold 5000000000 tokens"),
        (["long.json"], "more query-key pairs than plans count"),
        (["rows.json", "--row", "0", "--join"], "got --join and --row. Pass one of them"),
    ],
)
def test_bad_input_gives_one_line(folder, capsys, arguments, message):
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("plan: ")
    assert said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: FILE. See"),
        (["list.json", "--hardware", "abacus"], "argument --hardware: invalid choice: 'abacus'"),
        (["list.json", "--head-size", "1e23"], "argument --head-size: invalid int value: '1e23'"),
    ],
)
def test_a_wrong_argument_gives_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", "plan", *arguments])
    with pytest.raises(SystemExit) as exit:
        command()
    said = capsys.readouterr().err
    assert exit.value.code == 2 and message in said and said.count("\n") == 1


def mean_bytes(layout):
    """Bytes that a rank sends on average, inside nodes and between them."""
    return [layout[f"forward_bytes_{x}_nodes_mean_rank"] for x in ("inside", "between")]


def test_comparison_as_tables_json_and_pictures(folder, capsys):
    arguments = ["rows.json", "--ranks", "2,4", "--nodes", "2", "--tokens-per-rank", "256"]
    assert run(*arguments, "--json") == 0
    said = capsys.readouterr()
    assert "[6/6] 4 ranks: predicting times" in said.err
    points = json.loads(said.out)["points"]
    assert [point["ranks"] for point in points] == [2, 4]
    # 512 columns: 512 of 700; 10 of 18 whole, one in part
    assert (points[0]["documents_cut"], points[0]["documents_left_out"]) == (2, 1 + 7)
    assert (points[1]["documents_cut"], points[1]["documents_left_out"]) == (0, 0)
    assert points[1]["tokens_per_rank"] == 2 * points[1]["tokens_per_rank_and_row"] == 512

    rows = ROWS
    config = PlacementConfig(ranks_per_node=2)
    plan = place_tokens(rows, world_size=4, columns=1024, config=config).plan
    layouts = {layout["name"]: layout for layout in points[1]["layouts"]}
    placed, ring = layouts["placed"], layouts["contiguous, ring"]
    config = PlanConfig(ranks_per_node=2)  # for 32 heads, 8 of keys
    moved = plan_attention(lengths=rows, world_size=4, columns=1024, config=config)
    assert layouts["balanced"]["queries_moved_all_ranks"] == moved.num_q_tokens_moved
    assert layouts["balanced"]["keys_moved_all_ranks"] == moved.num_kv_tokens_moved
    q_bytes = 2 * 32 * 128 * 2  # and the output that returns
    assert 4 * sum(mean_bytes(layouts["balanced"])) == (
        moved.num_q_tokens_moved * q_bytes + moved.num_kv_tokens_moved * q_bytes // 4
    )
    assert placed["keys_moved_all_ranks"] == plan.num_kv_tokens_moved
    assert placed["work_max_over_mean"] == pytest.approx(plan.imbalance)
    assert placed["slowest_rank"] == plan.pairs.argmax()
    row_bytes = 2 * 8 * 128 * 2
    received = np.array(plan.kv_metadata.num_recv_tokens, np.int64)[:, :4]
    between = received.copy()
    between[:2, :2] = between[2:, 2:] = 0
    assert 4 * mean_bytes(placed)[1] == between.sum() * row_bytes
    assert 4 * sum(mean_bytes(placed)) == plan.num_kv_tokens_moved * row_bytes
    most = max(between.sum(0).max(), between.sum(1).max()) * row_bytes
    assert placed["forward_bytes_between_nodes_busiest_rank"] == most

    # Contiguous work, counted query by query.
    pairs = np.zeros(4)
    for row in ROWS:
        position = np.concatenate([np.arange(1, length + 1) for length in row])
        np.add.at(pairs, np.arange(len(position)) // 256, position)
    assert ring["work_max_over_mean"] == pytest.approx(pairs.max() / pairs.mean())
    assert ring["slowest_rank"] == pairs.argmax() == 2
    assert ring["keys_moved_all_ranks"] == 4 * 3 * 512
    # Each rank sends 3 times; half of the ranks to the other node.
    assert mean_bytes(ring) == [3 * 512 * row_bytes / 2] * 2
    assert ring["forward_bytes_between_nodes_busiest_rank"] == 3 * 512 * row_bytes

    slowest = points[1]["slowest_before_planning"]
    in_document = sum(range(513, 701))  # keys of its queries on rank 2
    assert slowest == {
        "rank": 2,
        "work_over_mean": pytest.approx(pairs[2] / pairs.mean()),
        "document": "rows.json list 0 item 0",
        "document_share_of_work": pytest.approx(in_document / pairs[2]),
        "document_tokens": 700,
        "document_tokens_on_rank": 188,
    }

    assert run(*arguments, "--describe", "--pictures", "pictures") == 0
    text = capsys.readouterr().out
    chosen = points[1]["choice"]
    assert re.search(rf"^  \* {chosen} ", text, re.M)
    assert re.search(
        r"slowest +rank 2 before planning: [\d.]+ times the mean .* 188 tokens of\n", text
    )
    assert "  rows.json list 0 item 0 (700 tokens)\n" in text
    assert max(map(len, text.splitlines())) <= 100
    assert points[1]["reason"].split(",")[0] in text.replace("\n  ", " ")
    assert "All numbers of ranks" in text and "Placement: 4 ranks of 512 tokens" in text
    names = [f"{kind}_{n}.png" for kind in ("balanced", "placed", "timeline") for n in (2, 4)]
    assert sorted(path.name for path in (folder / "pictures").iterdir()) == sorted(names)


def test_the_command_chooses_as_choose_algorithm(folder, capsys):
    """One truth: the same plans, the same traffic of the busiest ranks, the same reason."""
    sizes: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "itemsize": 2}
    sizes |= {"num_ranks": 16, "tokens_per_rank": 64, "can_place": True}
    for name in ("h100", "cpu"):
        arguments = ["rows.json", "--ranks", "16", "--tokens-per-rank", "64", "--hardware", name]
        assert run(*arguments, "--json") == 0
        (point,) = json.loads(capsys.readouterr().out)["points"]
        choice = choose_algorithm(ROWS, hardware=HARDWARE[name], **sizes)
        assert point["reason"] == choice.reason
        assert point["algorithm"] == repr(choice.algorithm)
        shared = "All ranks share 2 cores: a step takes as long as the work of all of them"
        assert (shared in choice.reason) == (name == "cpu")
        seconds = {name: x["seconds"] for name, x in point["predictions"].items()}
        waits = {name: x["rearrangement_seconds"] for name, x in point["predictions"].items()}
        for algorithm, prediction in choice.predictions.items():
            assert seconds[algorithm] - waits[algorithm] == pytest.approx(prediction.total)


@pytest.mark.parametrize("row, tokens", [(0, 128), (1, 104)])
def test_masks_of_arrays(folder, capsys, row, tokens):
    """Arrays are cut, or padded, to the columns of the ranks, as the documents are."""
    ids = ids_of(ROWS)[row : row + 1]
    mask_of = {
        "prefix_lm": lambda x: PrefixLM(x["in_prefix"]),
        "blocks": lambda x: Blocks(x["block_ids"]),
        "shared_prefix": lambda x: SharedPrefix(x["completion_ids"]),
        "tree": lambda x: Tree(x["span_ids"], x["parents"]),
        "ranges": lambda x: Ranges(x["k_start"], x["k_end"]),
        "full": lambda x: "full",
        "block_causal:16": lambda x: BlockCausal(16),
    }
    sizes: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "itemsize": 2}
    sizes |= {"num_ranks": 8, "tokens_per_rank": tokens, "can_place": True}
    columns = 8 * tokens
    ids = np.pad(ids, ((0, 0), (0, max(0, columns - ids.shape[1]))))[:, :columns]
    kept = [np.unique_counts(x[x > 0]).counts.tolist() for x in ids]
    given = mask_arrays(ids_of(ROWS)[row : row + 1])
    for name, x in given.items():
        if name != "parents":
            more = ((0, 0), (0, max(0, columns - x.shape[1])))
            given[name] = np.pad(x, more, constant_values=-(name == "span_ids"))[:, :columns]
    for name, make in mask_of.items():
        arguments = ["masks.npz", "--mask", name, "--row", row, "--ranks", 8]
        assert run(*arguments, "--tokens-per-rank", tokens, "--json") == 0
        (point,) = json.loads(capsys.readouterr().out)["points"]
        choice = choose_algorithm(kept, mask=make(given), hardware=HARDWARE["h100"], **sizes)
        assert point["reason"] == choice.reason, name


def keys_of(value, path=""):
    """Yields the path of every key; the names of algorithms are `NAME`."""
    if isinstance(value, list):
        for item in value:
            yield from keys_of(item, f"{path}[]")
    elif isinstance(value, dict):
        for key, item in value.items():
            below = "NAME" if path.endswith("predictions") else key
            inner = f"{path}.{below}" if path else below
            if not isinstance(item, dict | list):
                yield inner
            yield from keys_of(item, inner)


def test_the_documentation_lists_all_keys(folder, capsys):
    assert run("rows.json", "--ranks", "16", "--json") == 0
    found = set(keys_of(json.loads(capsys.readouterr().out)))
    page = (ROOT / "docs/plan_command.md").read_text()
    described = re.findall(r"^\| `([a-z][\w.\[\]]+)` \|", page, re.M)
    assert len(described) == len(set(described))
    assert found == set(described)
