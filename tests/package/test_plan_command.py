"""The plan command: every form of input, numbers that agree with their sources, helpful errors."""

import argparse
import json
import re

import numpy as np
import pytest

from jax_cp_dispatch import PlacementConfig, PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.plan_command.lengths import InputError, fill_ranks, read_lengths
from jax_cp_dispatch.plan_command.run import add_arguments, main

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
        "object.json": '[{"lengths": [700, 200]}, {"lengths": [50]}]',
        "one.csv": "700\n200\n50\n",
        "named.csv": "name,tokens\na,700\nb,200\n\nc,50\n",
        "lines.txt": "# documents\n700\n\n200  # the second\n50\n",
        "bad_lines.txt": "700\nmany\n",
        "negative.json": "[5, -1]",
        "fraction.json": "[5, 1.5]",
        "mixed.json": "[5, [6]]",
        "broken.json": "[5,",
        "wide.csv": "a,b\n1,2\n",
        "empty.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "texts").mkdir()
    for name, length in (("a", 30), ("b", 12)):
        (tmp_path / "texts" / name).write_text("x" * length)
    return tmp_path


@pytest.mark.parametrize(
    "name, expected",
    [
        *((name, [[700, 200, 50]]) for name in ("list.json", "one.csv", "named.csv", "lines.txt")),
        ("rows.json", ROWS),
        ("object.json", [[700, 200], [50]]),
    ],
)
def test_every_form_of_input(folder, name, expected):
    assert read_lengths([folder / name], column=None, join=False, limit=None) == expected


def test_folders_several_files_and_joined_rows(folder):
    options = {"column": None, "limit": None}
    (texts,) = read_lengths([folder / "texts"], join=False, **options)
    assert sorted(texts) == [12, 30]
    files = [folder / "list.json", folder / "lines.txt"]
    assert read_lengths(files, join=False, **options) == [[700, 200, 50] * 2]
    files = [folder / "list.json", folder / "rows.json"]
    assert read_lengths(files, join=True, **options) == [[700, 200, 50, *ROWS[0], *ROWS[1]]]
    with pytest.raises(InputError, match="--join"):
        read_lengths(files, join=False, **options)


def test_filling_ranks_cuts_one_document_per_row():
    batch = fill_ranks([[10, 10, 10, 0, 10], [7]], num_ranks=3, tokens_per_rank=8)
    assert batch.rows == ((10, 10, 4), (7,))
    assert batch.num_left_out == 2
    assert fill_ranks([[10, 3], [7]], num_ranks=3, tokens_per_rank=None).tokens_per_rank == 5


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
        (["list.json", "--window", "0"], "--window is 0; pass at least 1"),
        (["list.json", "--kv-heads", "3"], "--heads 32 is not a multiple of --kv-heads 3"),
        (["list.json", "--pictures", "empty.txt"], "cannot create the folder empty.txt"),
    ],
)
def test_bad_input_gives_one_line(folder, capsys, arguments, message):
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("plan: ")
    assert said.err.count("\n") == 1 and not said.out


def test_comparison_as_tables_json_and_pictures(folder, capsys):
    arguments = ["rows.json", "--ranks", "2,4", "--nodes", "2", "--tokens-per-rank", "256"]
    assert run(*arguments, "--json") == 0
    said = capsys.readouterr()
    assert "[6/6] 4 ranks: predicting times" in said.err
    points = json.loads(said.out)["points"]
    assert [point["ranks"] for point in points] == [2, 4]
    assert points[0]["left_out"] == 2 + 8  # 512 columns: 512 of 700; 10 of 18 whole, one in part
    assert points[1]["left_out"] == 0

    rows = fill_ranks(ROWS, num_ranks=4, tokens_per_rank=256).rows
    config = PlacementConfig(ranks_per_node=2)
    plan = place_tokens(rows, world_size=4, columns=1024, config=config).plan
    layouts = {layout["name"]: layout for layout in points[1]["layouts"]}
    placed, ring = layouts["placed"], layouts["contiguous, ring"]
    config = PlanConfig(ranks_per_node=2)  # for 32 heads, 8 of keys
    moved = plan_attention(lengths=rows, world_size=4, columns=1024, config=config)
    assert layouts["balanced"]["queries"] == moved.num_q_tokens_moved
    assert layouts["balanced"]["keys"] == moved.num_kv_tokens_moved
    sent = layouts["balanced"]["bytes_inside"] + layouts["balanced"]["bytes_between"]
    q_bytes = 2 * 32 * 128 * 2  # and the output that returns
    assert sent == moved.num_q_tokens_moved * q_bytes + moved.num_kv_tokens_moved * q_bytes // 4
    assert placed["keys"] == plan.num_kv_tokens_moved
    assert placed["imbalance"] == pytest.approx(plan.imbalance)
    row_bytes = 2 * 8 * 128 * 2
    received = np.array(plan.kv_metadata.num_recv_tokens, np.int64)[:, :4]
    between = received[:2, 2:].sum() + received[2:, :2].sum()
    assert placed["bytes_between"] == between * row_bytes
    assert placed["bytes_inside"] + placed["bytes_between"] == placed["keys"] * row_bytes

    # Contiguous work, counted query by query.
    pairs = np.zeros(4)
    for row in ROWS:
        position = np.concatenate([np.arange(1, length + 1) for length in row])
        np.add.at(pairs, np.arange(len(position)) // 256, position)
    assert ring["imbalance"] == pytest.approx(pairs.max() / pairs.mean())
    assert ring["keys"] == 4 * 3 * 512
    assert ring["bytes_between"] == ring["bytes_inside"] == ring["keys"] * row_bytes / 2

    assert run(*arguments, "--describe", "--pictures", "pictures") == 0
    text = capsys.readouterr().out
    chosen = points[1]["choice"]
    assert re.search(rf"^  \* {chosen} ", text, re.M)
    assert points[1]["reason"].split(",")[0] in text.replace("\n  ", " ")
    assert "All numbers of ranks" in text and "Placement: 4 ranks of 512 tokens" in text
    names = [f"{kind}_{n}.png" for kind in ("balanced", "placed", "timeline") for n in (2, 4)]
    assert sorted(path.name for path in (folder / "pictures").iterdir()) == sorted(names)
