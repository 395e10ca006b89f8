"""The plan command: numbers that agree with their sources, every form of input, and errors."""

import dataclasses
import json
import os
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest

from jax_cp_dispatch import PlanConfig, choose_algorithm, place_tokens, plan_attention
from jax_cp_dispatch.__main__ import main
from jax_cp_dispatch.cost import HARDWARE
from jax_cp_dispatch.masks import BlockCausal

ROOT = pathlib.Path(__file__).parents[2]
ROWS = [[700, 200], [50] * 18]


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder of inputs; returns its status, and what it says."""
    monkeypatch.chdir(tmp_path)
    texts = {
        "list.json": "\ufeff[700, 200, 50.0]",
        "rows.json": json.dumps(ROWS),
        "cut.json": "[[10, 10, 0, 10, 0, 10], [7]]",
        "huge.json": "[1e10]",
        "long.json": "[3e9, 5]",
        "negative.json": "[5, -1]",
        "fraction.json": "[5, 1.5]",
        "mixed.json": "[5, [6]]",
        "broken.json": "[5,",
        "deep.json": "[" * 100_000,
        "text.json": '["100"]',
        "object.json": '{"lengths": [700]}',
        "empty.json": "[0, 0]",
        "lengths.csv": "700,200",
        "text.npy": "[700]",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    ids = np.array([np.repeat(np.arange(1, len(row) + 1), row) for row in ROWS])
    for name, x in {"ids": ids, "row": ids[0], "floats": ids / 2, "cube": ids[None]}.items():
        np.save(tmp_path / f"{name}.npy", x)
    np.save(tmp_path / "twice.npy", np.array([1, 2, 1]))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", "plan", *map(str, arguments)])
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr()

    return run


def num_bytes(cell):
    """Reads "65.5 KB", which is rounded to its last digit."""
    number, unit = cell.split()
    scale = 1000 ** "BKMGTP".index(unit[0])
    return pytest.approx(float(number) * scale, abs=scale * (0.051 if "." in number else 0.51))


def test_tables_and_pictures(plan, tmp_path):
    options = "--ranks", 4, "--nodes", 2, "--tokens-per-rank", 200, "--forward"
    code, said = plan("rows.json", *options, "--describe", "--pictures", "pictures")
    assert code == 0 and "[3/3] predicting times" in said.err
    text = said.out
    assert max(map(len, text.splitlines())) <= 100
    # Of 900 columns 800 remain: the second document of 200 is cut, two of 50 are left out.
    assert "too long   200 tokens exceed the ranks; they are cut off" in text
    rows = [[700, 100], [50] * 16]
    config = PlanConfig(ranks_per_node=2)  # for 32 heads, 8 of keys
    moved = plan_attention(lengths=rows, world_size=4, columns=800, config=config)
    by_time = dataclasses.replace(config, hardware="h100", backward=True)
    placed = place_tokens(rows, world_size=4, columns=800, config=by_time).plan
    pairs = np.zeros(4)  # contiguous work, counted query by query
    for row in rows:
        position = np.concatenate([np.arange(1, length + 1) for length in row])
        np.add.at(pairs, np.arange(len(position)) // 200, position)
    assert (
        f"max/mean {pairs.max() / pairs.mean():.3f} before planning; "
        f"{float(moved.imbalance):.3f} balanced, {float(placed.imbalance):.3f} placed"
    ) in text
    lines = re.findall(r"^  [ *] (\w+) +([\d.]+ [mµn]?s .*)$", text, flags=re.M)
    cells = {name: re.split(r"  +", columns.strip()) for name, columns in lines}
    # Bytes of rows of 8 key heads, and of queries that return: inside nodes, between, and of the
    # busiest rank, which sends or receives most.
    received = np.array(placed.kv_metadata.num_recv_tokens, np.int64)[:, :4]
    np.fill_diagonal(received, 0)
    is_inside, row_bytes = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool)), 2 * 8 * 128 * 2
    of_links = [np.where(is_inside, received, 0), np.where(is_inside, 0, received)]
    rows = [x for y in of_links for x in (y.sum() / 4, max(y.sum(0).max(), y.sum(1).max()))]
    assert rows[0] > 0
    assert [*map(num_bytes, cells["placed"][-4:])] == [x * row_bytes for x in rows]
    of_ring = [3 * 400 * row_bytes / 2 * share for share in (1, 2, 1, 2)]
    assert [*map(num_bytes, cells["ring"][-4:])] == of_ring
    assert "Placement: 4 ranks of 400 tokens" in text
    names = ["balanced.png", "placed.png", "timeline.png"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == names


@pytest.mark.parametrize("hardware, mask", [("h100", "causal"), ("cpu", "block_causal:16")])
def test_the_command_chooses_as_choose_algorithm(plan, hardware, mask):
    """One truth: the same plans, the same traffic of the busiest ranks, the same reason."""
    sizes: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "itemsize": 2}
    sizes |= {"num_ranks": 16, "tokens_per_rank": 64, "can_place": True}
    options = "--ranks", 16, "--tokens-per-rank", 64, "--hardware", hardware, "--mask", mask
    _, said = plan("rows.json", *options)
    of_mask = BlockCausal(16) if ":" in mask else mask
    choice = choose_algorithm(ROWS, mask=of_mask, hardware=HARDWARE[hardware], **sizes)
    assert choice.reason in " ".join(said.out.split())
    assert re.search(rf"^  \* {choice.algorithm.name}", said.out, re.M)


def test_the_page_shows_what_the_command_prints(plan, tmp_path):
    (shown,) = re.findall(
        r"```text\n(.*?)```", (ROOT / "docs" / "plan_command.md").read_text(), re.DOTALL
    )
    batches = json.loads((ROOT / "tests" / "data" / "lengths" / "dist_wlbllm.json").read_text())
    lengths = next(x["lengths"] for x in batches if (x["tokens"], x["seed"]) == (524_288, 0))
    (tmp_path / "published.json").write_text(json.dumps(lengths))
    _, said = plan("published.json", "--ranks", 16, "--tokens-per-rank", 32768)
    assert set(shown.splitlines()) <= set(said.out.splitlines())


def test_a_window_shows_its_halo(plan):
    """Each of 4 ranks of 400 tokens in 2 rows sends 7 rows of each to the next one."""
    options = "--ranks", 4, "--tokens-per-rank", 200, "--mask", "sliding_window:8", "--describe"
    code, said = plan("rows.json", *options)
    assert code == 0 and re.search(r"^  [ *] halo ", said.out, re.M)
    described = said.out[said.out.index("\nHalo\n") :]
    assert f"1,642 received; {3 * 2 * 7} of them from another rank" in described


@pytest.mark.parametrize(
    "arguments, documents",
    [
        ("list.json", "3 of 50 to 700 tokens; batch rows: 1"),
        ("ids.npy", "20 of 50 to 700 tokens; batch rows: 2"),
        ("row.npy", "2 of 200 to 700 tokens; batch rows: 1"),
        ("rows.json --row 1", "18 of 50 to 50 tokens; batch rows: 1"),
        (
            "cut.json --ranks 3 --tokens-per-rank 8 --nodes 1",
            "4 of 4 to 10 tokens; batch rows: 2.*too long   16 tokens exceed the ranks",
        ),
    ],
)
def test_every_form_of_input(plan, arguments, documents):
    code, said = plan(*arguments.split())
    assert code == 0 and re.search(documents, said.out, flags=re.S)


def test_a_reader_that_stops_early_is_no_error(plan, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:  # closing it writes what is left, as Python's end does
        monkeypatch.setattr(sys, "stdout", stdout)
        code, said = plan("list.json")
    assert code == 0 and "Error" not in said.err


NEEDS_LENGTHS = " needs a list of lengths, such as [700, 200], or a list of such lists, one per"
NEEDS_IDS = " needs integer segment ids [T] or [B, T]: "


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["lengths.csv"], "cannot read lengths.csv: its suffix is '.csv'. Pass lengths in"),
        (["no.json"], "cannot read no.json: No such file or directory. Pass another"),
        *([[name], name + NEEDS_IDS] for name in ("text.npy", "objects.npy", "floats.npy")),
        *([[name], name + NEEDS_IDS] for name in ("cube.npy", "twice.npy")),
        *(
            [[f"{name}.json"], f"{name}.json{NEEDS_LENGTHS}"]
            for name in ("negative", "fraction", "mixed", "broken", "deep", "text", "object")
        ),
        (["empty.json"], "empty.json has no documents with tokens"),
        (["rows.json", "--row", "2"], "--row is 2; pass a batch row of the file, 0 to 1."),
        (["list.json", "--ranks", "12"], "12 ranks cannot be divided into h100 nodes of 8. Pass"),
        (["list.json", "--ranks", "99999"], "--ranks: it is 99999; pass 1 to 16384"),
        (["list.json", "--nodes", "3"], "8 ranks cannot be divided into 3 nodes. Pass"),
        (["list.json", "--nodes", "2", "--hardware", "cpu"], "has no links between nodes"),
        (["list.json", "--mask", "tree"], "--mask is 'tree'; pass one of "),
        (["list.json", "--mask", "chunked:0"], "--mask is 'chunked:0'; pass one of "),
        (["list.json", "--mask", "causal:"], "--mask is 'causal:'; pass one of "),
        (["list.json", "--head-size", "1" + "0" * 23], "--head-size: it is 1000000000"),
        (["list.json", "--itemsize", "32"], "--itemsize: it is 32; pass 1 to 16"),
        (["list.json", "--kv-heads", "3"], "--heads 32 is not a multiple of --kv-heads 3"),
        (["list.json", "--pictures", "list.json"], "cannot create the folder list.json"),
        (["huge.json", "--ranks", "2", "--hardware", "cpu"], "rank would hold 5000000000 tokens"),
        (["long.json"], "more than 2**61 query-key pairs, the most"),
        ([], "the following arguments are required: FILE. See"),
        (["list.json", "--hardware", "abacus"], "argument --hardware: invalid choice: 'abacus'"),
    ],
)
def test_bad_input_gives_one_line(plan, unchecked_types, arguments, message):
    code, said = plan(*arguments)
    assert code == 2 and message in said.err and "plan: " in said.err
    assert said.err.count("\n") == 1 and not said.out
