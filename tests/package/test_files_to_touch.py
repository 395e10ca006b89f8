"""How many files an addition touches, as CONTRIBUTING says: counted for one that exists."""

import inspect
import pathlib
import re

import pytest

import jax_cp_dispatch

SOURCE = pathlib.Path(inspect.getfile(jax_cp_dispatch)).parent


def files_that_name(word):
    """Returns the files of the package, and of the C++ sources, that contain a word."""
    csrc = SOURCE.parent / "csrc"
    files = [*SOURCE.rglob("*.py"), *csrc.rglob("*.h"), *csrc.rglob("*.cc")]
    found = (path for path in files if re.search(rf"\b{word}\b", path.read_text()))
    return {str(path.relative_to(SOURCE.parent)) for path in found}


@pytest.mark.parametrize(
    "mask, file", [("Chunked", "chunked.py"), ("BlockCausal", "block_causal.py")]
)
def test_a_mask_touches_two_files(mask, file):
    """Its list, and its spelling in a command. Beside them: its file, an error, an adapter."""
    two = {"jax_cp_dispatch/masks/__init__.py", "jax_cp_dispatch/plan_command/mask.py"}
    examples = {"jax_cp_dispatch/masks/read.py", "jax_cp_dispatch/adapters/maxtext_mask.py"}
    own = f"jax_cp_dispatch/masks/{file}"
    assert own in files_that_name(mask)
    assert files_that_name(mask) - {own} - examples <= two


def test_a_layer_touches_one_file():
    """The list of the layers, beside its own file."""
    assert files_that_name("linear_attention") == {
        "jax_cp_dispatch/sequence/__init__.py",
        "jax_cp_dispatch/sequence/linear_attention.py",
    }
