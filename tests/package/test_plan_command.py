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
from jax_cp_dispatch._command import InputError
from jax_cp_dispatch.cost import HARDWARE
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
        "lines.jsonl": '{"length": 700}\n{"length": 200}\n50.0\n',
        "object.json": '[{"lengths": [700, 200]}, {"lengths": [50]}]',
        "one.csv": "700\n200\n50\n",
        "named.tsv": "name\ttokens\na\t700\nb\t200\nc\t50\n",
        "semicolons.csv": "id;tokens\n1;700\n2;200\n3;50\n",
        "named.csv": "name,tokens\na,700\nb,200\n\nc,50\n",
        "lines.txt": "# documents\n700\n\n200  # the second\n50\n",
        "marked.csv": "\ufefflength,name\n700,a\n200,b\n50,c\n",
        "marked.json": "\ufeff[700, 200, 50]",
        "huge.json": "[1e10]",
        "long.json": "[3e9, 5]",
        "bad_lines.txt": "700\nmany\n",
        "negative.json": "[5, -1]",
        "fraction.json": "[5, 1.5]",
        "mixed.json": "[5, [6]]",
        "broken.json": "[5,",
        "deep.json": "[" * 100_000,
        "text.json": '["100"]',
        "digits.json": f"[{'9' * 5000}]",
        "digits.txt": "9" * 5000,
        "wide.csv": "a,b\n1,2\n",
        "empty.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "texts").mkdir()
    for name, length in (("a", 30), ("b", 12)):
        (tmp_path / "texts" / name).write_text("x" * length)
    return tmp_path


@pytest.mark.parametrize(
    "name, expected",
    [
        *(
            (name, [[700, 200, 50]])
            for name in (
                *("list.json", "lines.jsonl", "lines.txt"),
                *("one.csv", "named.csv", "named.tsv", "semicolons.csv"),
                *("marked.csv", "marked.json"),
            )
        ),
        ("rows.json", ROWS),
        ("object.json", [[700, 200], [50]]),
    ],
)
def test_every_form_of_input(folder, name, expected):
    assert rows_of([folder / name]) == expected


def rows_of(paths, **options):
    return [row.lengths for row in read_lengths(paths, **options).rows]


def test_folders_several_files_and_joined_rows(folder):
    (texts,) = rows_of([folder / "texts"])
    assert sorted(texts) == [12, 30]
    files = [folder / "list.json", folder / "lines.txt"]
    assert rows_of(files) == [[700, 200, 50] * 2]
    files = [folder / "list.json", folder / "rows.json"]
    assert rows_of(files, join=True) == [[700, 200, 50, *ROWS[0], *ROWS[1]]]
    with pytest.raises(InputError, match="--join"):
        read_lengths(files)


@pytest.mark.parametrize(
    "name, options, understood",
    [
        ("list.json", {}, "list.json: a list of 3 lengths. Taken as one batch row."),
        ("rows.json", {"row": 1}, "rows.json: 2 lists of lengths. Taken as row 1 of 2, alone."),
        ("rows.json", {"join": True}, "2 lists of lengths. Taken as one batch row."),
        ("rows.json", {}, "Taken as 2 rows of one batch, planned together. If they are separate"),
        ("named.csv", {}, "named.csv: 3 lengths of the column 'tokens'."),
        ("one.csv", {}, "one.csv: 3 lengths. Taken"),
        ("lines.txt", {}, "lines.txt: 3 lengths, one per line."),
        ("texts", {}, "texts: 2 text files, in a random order, one token per byte."),
    ],
)
def test_what_was_understood(folder, name, options, understood):
    """A list of separate batches looks like the rows of one batch; only the user knows."""
    found = read_lengths([folder / name], **options)
    assert understood in found.understood
    if "row" in options:
        assert [row.lengths for row in found.rows] == [ROWS[1]]


def test_documents_are_named_by_their_place_in_a_file(folder):
    for file, index, name in (
        ("lines.txt", 2, "lines.txt line 5"),
        ("named.csv", 2, "named.csv line 5"),
        ("list.json", 1, "list.json item 1"),
    ):
        (row,) = read_lengths([folder / file]).rows
        assert row.name(index) == str(folder / name)
    assert read_lengths([folder / "rows.json"]).rows[1].name(3).endswith("rows.json list 1 item 3")
    (texts,) = read_lengths([folder / "texts"]).rows
    assert texts.name(texts.lengths.index(30)) == str(folder / "texts" / "a")
    files = [folder / "list.json", folder / "lines.txt"]
    assert read_lengths(files).rows[0].name(3).endswith("lines.txt line 2")


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
        (["nowhere"], "cannot read nowhere: No such file or directory. Pass a file of lengths"),
        (["bad_lines.txt"], "bad_lines.txt line 2 is 'many'; it needs a whole number of tokens"),
        (["negative.json"], "negative.json item 1 is -1; it needs a whole number"),
        (["fraction.json"], "fraction.json item 1 is 1.5; it needs a whole number"),
        (["mixed.json"], "needs a list of lengths, such as"),
        (["broken.json"], "broken.json is not JSON: Expecting value"),
        (["wide.csv"], "its columns are a, b. Pass --column NAME"),
        (
            ["named.csv", "--column", "size"],
            "its columns are name, tokens. Pass --column",
        ),
        (["binary"], "is not text. Pass lengths as JSON"),
        (["empty.txt"], "no documents with tokens"),
        (["list.json", "--ranks", "8,x"], "--ranks is '8,x'; pass one number, or several"),
        (["list.json", "--ranks", "12"], "12 ranks do not fill h100 nodes of 8. Pass --nodes"),
        (["list.json", "--nodes", "3"], "--nodes 3 does not divide 8 ranks"),
        (["list.json", "--nodes", "2", "--hardware", "cpu"], "has no links between nodes"),
        (["list.json", "--window", "0"], "--window is 0; pass 1 to 2147483647"),
        (["list.json", "--window", "1" + "0" * 23], "--window is 1000000000"),
        (["list.json", "--head-size", "1" + "0" * 23], "--head-size is 1000000000"),
        (["list.json", "--heads", "1" + "0" * 23], "pass 1 to 65536"),
        (["list.json", "--itemsize", "32"], "--itemsize is 32; pass 1 to 16"),
        (["deep.json"], "deep.json has lists inside lists that are too deep to read"),
        (
            ["text.json"],
            "text.json item 0 is the text '100'; it needs a whole number of tokens",
        ),
        (["digits.json"], "digits.json is not JSON: Exceeds the limit (4300 digits)"),
        (["digits.txt"], "digits.txt line 1 is '999999999999...9999999999999'; it needs a whole"),
        (["list.json", "--kv-heads", "3"], "--heads 32 is not a multiple of --kv-heads 3"),
        (["list.json", "--pictures", "empty.txt"], "cannot create the folder empty.txt"),
        (["rows.json", "--row", "2"], "--row is 2, but the files have rows 0 to 1. Pass one"),
        (["list.json", "--row", "-1"], "--row is -1, but the files have only row 0"),
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
