"""What the plan command reads: every form of input, and helpful errors."""

import pathlib
import subprocess
import sys

import pytest
from plan_inputs import ROWS, run, write_inputs

from jax_cp_dispatch.__main__ import main as command
from jax_cp_dispatch.plan_command.batch import fill_ranks
from jax_cp_dispatch.plan_command.lengths import Lengths, read_lengths

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


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
        ("list.json", {}, "list.json: a list of 3 lengths. Read as one batch row."),
        ("rows.json", {"row": 1}, "rows.json: 2 lists of lengths. Read as row 1 of 2, alone."),
        ("rows.json", {"join": True}, "2 lists of lengths. Read as one batch row."),
        ("rows.json", {}, "Read as 2 rows of one batch, planned together. If they are separate"),
        ("ids.npy", {}, "ids.npy: segment ids of 20 documents. Read as 2 rows of one batch"),
        ("one.npy", {}, "one.npy: segment ids of 2 documents. Read as one batch row."),
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
        (
            ["list.json", "--ranks", "12"],
            "12 ranks cannot be divided into h100 nodes of 8. Pass",
        ),
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
        (["deep.json"], "deep.json has lists that are nested too deeply"),
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
        (["long.json"], "more than 2**61 query-key pairs, the most"),
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
