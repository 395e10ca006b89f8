"""The demonstration runs as a user runs it, is right, and rejects invalid requests."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from attention_oracle import attention, attention_gradients

from jax_cp_dispatch.__main__ import main as command
from jax_cp_dispatch.demo.dense import dense_attention
from jax_cp_dispatch.demo.documents import Document, pack_documents, read_documents

pytestmark = pytest.mark.usefixtures("environment_of_a_user")


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


@pytest.mark.parametrize("long_documents", ["span", "cut"])
def test_demo_is_right(folder, tmp_path_factory, long_documents):
    work = tmp_path_factory.mktemp("work")
    options = ("--tokens-per-rank", 1024, "--ranks", 4, "--long-documents", long_documents)
    done = run_demo(folder, *options, "--picture", "picture.png", cwd=work)
    assert done.returncode == 0, done.stderr
    for words in (
        "documents ",
        "tokens  ",
        "work before planning  max/mean",
        "work after planning   max/mean",
        "bytes moved",
        "time of planning",
        "time of movement",
        "time of attention",
        "largest difference    out ",
        "correct: the tolerance is",
    ):
        assert words in done.stdout
    assert (work / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "[7/7]" in done.stderr


def test_missing_folder(tmp_path):
    done = run_demo("nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "demo: nowhere is not a folder. Name one that holds text files." in done.stderr


@pytest.mark.parametrize(
    "option, value, message",
    [
        *((option, 0, f"{option} is 0; pass 1 to ") for option in ("--ranks", "--longest")),
        ("--ranks", 10**23, "--ranks is 100000000000000000000000; pass 1 to 1024."),
        ("--tokens-per-rank", 10**15, "--tokens-per-rank is 1000000000000000; pass 1 to 2097152."),
        ("--seed", -1, "--seed is -1; pass 0 to "),
        ("--pattern", "/a", "--pattern is '/a': Non-relative patterns are unsupported. Pass one"),
        ("--pattern", "a**", "--pattern is 'a**'"),
        ("--picture", "nowhere/a.png", "--picture is nowhere/a.png; it needs to be a file in an e"),
        ("--picture", ".", "--picture is .; it needs to be a file in an existing folder."),
        ("--picture", "a.b", "--picture is a.b; it needs a suffix such as .png"),
    ],
)
def test_bad_arguments_give_one_line(capsys, monkeypatch, tmp_path, option, value, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["jax_cp_dispatch", "demo", ".", option, str(value)])
    assert command() == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"demo: {message}") and said.err.count("\n") == 1 and not said.out


def test_folder_without_text(tmp_path):
    done = run_demo(tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "no text file matches '*'" in done.stderr


def test_reading_skips_binary_files_and_has_a_fixed_order(folder):
    first = list(read_documents(folder, pattern="*", seed=1))
    assert sorted(len(d.tokens) for d in first) == [5, 40, 700, 900, 1500, 2200, 3000]
    again = [d.name for d in read_documents(folder, pattern="*", seed=1)]
    assert again == [d.name for d in first]


def documents(*lengths):
    return iter(Document(str(n), np.full(n, n % 256, np.uint8)) for n in lengths)


def test_packing_across_ranks_cuts_only_the_last_document():
    packed = pack_documents(
        documents(50, 30, 90), num_ranks=4, tokens_per_rank=30, long_documents="span"
    )
    assert packed.spans == (("50", 0, 50), ("30", 50, 80), ("90", 80, 120))
    np.testing.assert_array_equal(packed.segment_ids[0], np.repeat([1, 2, 3], [50, 30, 40]))
    np.testing.assert_array_equal(packed.positions[0, 48:52], [48, 49, 0, 1])


def test_packing_within_ranks_cuts_long_documents_and_pads():
    packed = pack_documents(
        documents(50, 20, 25, 10), num_ranks=3, tokens_per_rank=30, long_documents="cut"
    )
    assert packed.spans == (("50", 0, 30), ("20", 30, 50), ("10", 50, 60), ("25", 60, 85))
    assert (packed.segment_ids[0, 85:] == 0).all()


def test_packing_cuts_documents_to_the_longest():
    packed = pack_documents(
        documents(50, 9, 30), num_ranks=2, tokens_per_rank=30, long_documents="span", longest=20
    )
    assert packed.spans == (("50", 0, 20), ("9", 20, 29), ("30", 29, 49))


def test_unknown_packing_is_rejected():
    with pytest.raises(ValueError, match="long_documents is 'bend'; needs span or cut"):
        pack_documents(documents(5), num_ranks=1, tokens_per_rank=8, long_documents="bend")


def test_the_reference_of_the_demo_agrees_with_the_oracle_of_the_tests():
    rng = np.random.default_rng(0)
    T, N, K, H = 300, 4, 2, 8
    q, k, v, g = (rng.normal(size=(T, n, H)) for n in (N, K, K, N))
    ranges = np.zeros((1, T), int), np.arange(1, T + 1)[None]
    out, lse = attention(q[None], k[None], v[None], *ranges)
    cotangents = g[None], np.zeros(lse.shape)
    want = (out, *attention_gradients(q[None], k[None], v[None], *ranges, *cotangents))
    for x, y in zip(dense_attention(q, k, v, g), want, strict=True):
        np.testing.assert_allclose(x, y[0], rtol=1e-10, atol=1e-10)


def test_default_folder_is_the_standard_library():
    import sysconfig

    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    document = next(read_documents(folder, pattern="*.py", seed=0))
    assert len(document.tokens) > 0
