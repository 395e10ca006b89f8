"""The demonstration runs as a user runs it, is right, and rejects invalid requests."""

import subprocess
import sys

import numpy as np
import pytest
from attention_oracle import attention, attention_gradients

from jax_cp_dispatch.__main__ import main as command
from jax_cp_dispatch.demo import Document, largest_difference, pack_documents, read_documents


def run_demo(*arguments, cwd):
    """Runs the demo in a separate process, because it configures its devices."""
    return subprocess.run(
        [sys.executable, "-m", "jax_cp_dispatch", "demo", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.fixture
def folder(tmp_path):
    """Writes documents of many lengths, one binary and one empty."""
    rng = np.random.default_rng(0)
    for index, length in enumerate([3000, 700, 40, 900, 1500, 5, 0, 2200]):
        letters = rng.integers(32, 127, length).astype(np.uint8)
        (tmp_path / f"{index}.txt").write_bytes(letters.tobytes())
    (tmp_path / "binary.txt").write_bytes(b"\x00\xff\x00")
    return tmp_path


def test_demo_is_right(folder, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    options = ("--tokens-per-rank", 1024, "--ranks", 4)
    done = run_demo(folder, *options, "--picture", "picture.png", cwd=work)
    assert done.returncode == 0, done.stderr
    for text in (
        "documents ",
        "tokens  ",
        "work before planning  max/mean",
        "work after planning   max/mean",
        "bytes moved",
        "time of planning",
        "time of attention",
        "largest difference    out ",
        "correct: the tolerance is",
    ):
        assert text in done.stdout
    assert (work / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "[6/6]" in done.stderr


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--ranks", 0, "--ranks is 0; pass 1 to "),
        ("--tokens-per-rank", 10**15, "--tokens-per-rank is 1000000000000000; pass 1 to 2097152."),
        ("--pattern", "/a", "--pattern is '/a': Non-relative patterns are unsupported. Pass one"),
        ("--picture", "nowhere/a.png", "--picture is nowhere/a.png; it needs to be a file in an e"),
        (
            "--picture",
            "a.b",
            "--picture is a.b; it needs to be a file in an existing folder, with a",
        ),
    ],
)
def test_bad_arguments_give_one_line(capsys, monkeypatch, tmp_path, option, value, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", "demo", ".", option, str(value)])
    assert command() == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"demo: {message}") and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize(
    "folder, message",
    [
        ("nowhere", "nowhere is not a folder. Name one that holds text files."),
        (".", "no text file matches '*'"),
    ],
)
def test_folders_without_text(capsys, monkeypatch, tmp_path, folder, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", "demo", folder])
    assert command() == 2
    assert message in capsys.readouterr().err


def test_reading_skips_binary_files_and_has_a_fixed_order(folder):
    first = list(read_documents(folder, pattern="*"))
    assert sorted(len(d.tokens) for d in first) == [5, 40, 700, 900, 1500, 2200, 3000]
    again = [d.name for d in read_documents(folder, pattern="*")]
    assert again == [d.name for d in first]


def documents(*lengths):
    return iter(Document(str(n), np.full(n, n % 256, np.uint8)) for n in lengths)


def test_packing_cuts_the_last_document_and_long_ones():
    packed = pack_documents(documents(50, 30, 90), num_tokens=120, longest=45)
    assert packed.spans == (("50", 0, 45), ("30", 45, 75), ("90", 75, 120))
    np.testing.assert_array_equal(packed.segment_ids[0], np.repeat([1, 2, 3], [45, 30, 45]))
    np.testing.assert_array_equal(packed.positions[0, 43:47], [43, 44, 0, 1])
    assert (packed.tokens[0, 45:75] == 30).all()


def test_packing_pads_if_documents_are_few():
    packed = pack_documents(documents(5, 2), num_tokens=10, longest=10)
    assert packed.spans == (("5", 0, 5), ("2", 5, 7))
    assert (packed.segment_ids[0, 7:] == 0).all()


def test_a_wrong_result_is_noticed():
    """Differences are relative to the largest entry; `jax.nn` itself is held to the oracle."""
    packed = pack_documents(documents(300, 40), num_tokens=345, longest=345)
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=(1, 345, n, 8)).astype(np.float32) for n in (4, 2, 2, 4)]
    length = np.repeat([0, 300, 340], [300, 40, 5])  # where the document begins
    start, end = length[None], np.where(np.arange(345) < 340, np.arange(1, 346), 340)[None]
    q, k, v, g = (x.astype(np.float64) for x in operands)
    out, lse = attention(q, k, v, start, end)
    gradients = attention_gradients(q, k, v, start, end, g, np.zeros(lse.shape))
    right = [out, *gradients]
    assert max(largest_difference(packed, operands, right, lambda _: None).values()) < 1e-5
    right[2][0, 7] *= 1.01
    wrong = largest_difference(packed, operands, right, lambda _: None)
    assert wrong["dk"] > 1e-4 and max(wrong["out"], wrong["dq"], wrong["dv"]) < 1e-5
