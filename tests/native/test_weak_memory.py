"""The protocol of channels under weak memory: every access of the kernels has an order.

relacy runs the host branch of csrc/kernels in random interleavings, in which an atomic load may
return an old value and each plain access needs an order. See weak_memory/model.cc.
`sanitizer_suite.py` runs the mutants, which check the model.
"""

import os
import pathlib
import shutil
import subprocess
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).parent / "weak_memory"
COMPILER = shutil.which("g++") or shutil.which("clang++")
RELACY = pathlib.Path(os.environ.get("RELACY_INCLUDE", "/usr/include"))
LIMIT = 600  # seconds. Only a deadlock takes this long.
NUM_RUNS = 1800  # of nine kinds of calls; each mutant is found after far fewer

needs_relacy = pytest.mark.skipif(
    not (RELACY / "relacy/relacy.hpp").is_file(),
    reason=f"no relacy in {RELACY}. On Debian: apt-get install relacy-dev. Elsewhere, set "
    "RELACY_INCLUDE to the folder that contains relacy/relacy.hpp",
)
pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"), needs_relacy]


class Mutant(NamedTuple):
    """One thing that is wrong: a text of csrc/kernels, which must be there once, and another."""

    name: str
    file: str
    old: str
    new: str


_RELAXED = "__ATOMIC_RELAXED)"
MUTANTS = [
    Mutant("an acquire that is none", "block.h", "__ATOMIC_ACQUIRE)", _RELAXED),
    Mutant("always the same half", "call.h", "(epoch & 1) * call.half_", "0 * call.half_"),
    Mutant("a release that is none", "block.h", "__ATOMIC_RELEASE)", _RELAXED),
    Mutant("an addition without order", "block.h", "__ATOMIC_ACQ_REL)", _RELAXED),
    Mutant(
        "a signal before the rows of the other block", "exchange.h",
        "&rank.state()->blocks_sent, 1) == num_blocks;", "&rank.state()->blocks_sent, 1) == 1;",
    ),
    Mutant(
        "a rank is told before the rows of the other block", "push_take.h",
        "0 - pushed) == 0)", "0 - pushed) != 0)",
    ),
    Mutant(
        "rows of a rank that has not signalled", "push_take.h",
        "           scratch_.heard[SenderOf(value)] != 0;", "           true;",
    ),
    Mutant(
        "a rank is told before all threads have stored", "push_take.h",
        "    State* state = rank_.state();\n    block_.Sync();\n",
        "    State* state = rank_.state();\n",
    ),
    Mutant(
        "a signal before the rows of a small call", "small.h",
        "    const Block warp = WarpOf(block);",
        "    Signal(block, rank);\n    const Block warp = WarpOf(block);",
    ),
    Mutant(
        "a small call whose threads do not wait for those that wait", "small.h",
        "  Wait(block, rank, &scratch->meet);\n  block.Sync();\n",
        "  Wait(block, rank, &scratch->meet);\n",
    ),
    Mutant(
        "no acknowledgement by ranks that pull nothing", "exchange.h",
        "    uint64_t arrived;\n",
        "    if (!call.is_dispatch && rank.sent(0)[from] == 0) continue;\n    uint64_t arrived;\n",
    ),
]  # fmt: skip


def compile_(folder, *arguments):
    command = [COMPILER, "-std=c++17", "-O1", "-w", f"-I{folder}", f"-I{HERE}", *arguments]
    subprocess.run(command, check=True, timeout=LIMIT, cwd=folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model's object file, and a folder for programs."""
    folder = tmp_path_factory.mktemp("weak_memory")
    compile_(ROOT / "csrc", f"-I{RELACY}", "-c", HERE / "model.cc", "-o", folder / "model.o")
    return folder / "model.o"


def run(model, folder, mutant=None):
    """Compiles the kernels, perhaps as a mutant, and returns what the model finds."""
    for part in ("kernels", "numerics"):
        shutil.copytree(ROOT / "csrc" / part, folder / part)
    if mutant is not None:
        path = folder / "kernels" / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file} no longer has this text once"
        path.write_text(text.replace(mutant.old, mutant.new))
    options = ["-fsanitize=thread", "-fno-tree-loop-distribute-patterns"]
    compile_(folder, *options, "-c", HERE / "protocol.cc", "-o", "protocol.o")
    compile_(folder, "protocol.o", model, "-o", "program")
    ran = subprocess.run(
        [folder / "program", str(NUM_RUNS)], capture_output=True, text=True, timeout=LIMIT
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_the_kernels_have_an_order_for_every_access(model, tmp_path):
    assert run(model, tmp_path) == (0, "ok\n")


def check_mutant(model, folder, mutant):
    code, said = run(model, folder, mutant)
    assert code == 1 and said.startswith("thread "), said
    print(said)
