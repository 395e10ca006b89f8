"""How many files an addition touches, as CONTRIBUTING says: counted for one that exists."""

import ast
import inspect
import pathlib
import re

import pytest

import jax_cp_dispatch
from jax_cp_dispatch.attention.algorithms import ALGORITHMS

SOURCE = pathlib.Path(inspect.getfile(jax_cp_dispatch)).parent
PREDICTED = ("attention", "cost", "plan_command")  # what reads the objects of algorithms


def files_that_name(word):
    """Returns the files of the package, and of the C++ sources, that contain a word."""
    csrc = SOURCE.parent / "csrc"
    files = [*SOURCE.rglob("*.py"), *csrc.rglob("*.h"), *csrc.rglob("*.cc")]
    found = (path for path in files if re.search(rf"\b{word}\b", path.read_text()))
    return {str(path.relative_to(SOURCE.parent)) for path in found}


@pytest.mark.parametrize(
    "mask, file", [("Chunked", "chunked.py"), ("BlockCausal", "block_causal.py")]
)
def test_a_mask_touches_one_file(mask, file):
    """Its list. Beside it: its file, an error, an adapter."""
    examples = {"jax_cp_dispatch/masks/read.py", "jax_cp_dispatch/adapters/maxtext_call.py"}
    own = f"jax_cp_dispatch/masks/{file}"
    assert own in files_that_name(mask)
    assert files_that_name(mask) - {own} - examples == {"jax_cp_dispatch/masks/__init__.py"}


def test_a_layer_touches_one_file():
    """The list of the layers, beside its own file."""
    assert files_that_name("linear_attention") == {
        "jax_cp_dispatch/sequence/__init__.py",
        "jax_cp_dispatch/sequence/linear_attention.py",
    }


def test_nothing_else_knows_the_experts():
    """A room of its own; the list of public names has it."""
    own = SOURCE / "experts"
    for path in SOURCE.rglob("*.py"):
        if own not in path.parents and path != SOURCE / "__init__.py":
            assert "jax_cp_dispatch.experts" not in path.read_text(), path


def names_in(path):
    """Yields the names of classes and variables in the code of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.alias | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id


def files_that_use(name):
    """Returns the files of the package whose code names a class; texts do not count."""
    named = (path for path in SOURCE.rglob("*.py") if name in path.read_text())
    return {str(path.relative_to(SOURCE)) for path in named if name in names_in(path)}


def test_an_algorithm_touches_three_files():
    """The lists of algorithms and of public names, beside its own file.

    Hamilton attention also has a profile.
    """
    lists = {"attention/algorithms/__init__.py", "attention/__init__.py", "__init__.py"}
    for name in ("Ulysses", "Halo"):
        assert files_that_use(name) == {f"attention/algorithms/{name.lower()}.py", *lists}
    more = {"attention/algorithms/hamilton.py", "attention/profile/hamilton.py"}
    assert files_that_use("Hamilton") == {*lists, *more}


def test_no_code_compares_the_name_of_an_algorithm():
    """An order of tokens is called "zigzag", too, so that name is not looked for."""
    names = {kind.name for kind in ALGORITHMS} - {"zigzag"}
    for path in (x for part in PREDICTED for x in (SOURCE / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.Match):
                constants = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)}
                assert not constants & names, path
