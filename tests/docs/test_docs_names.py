"""The documentation mentions every public name."""

import pathlib
import re

import pytest

import jax_cp_dispatch
from jax_cp_dispatch import plots

DOCS = pathlib.Path(__file__).parents[2] / "docs"
NAMESPACES = [
    "adapters",
    "buffers",
    "cost",
    "cycles",
    "gpu",
    "metadata",
    "profiling",
    "scaling",
    "scenarios",
]
MODULES = {
    "jax_cp_dispatch": jax_cp_dispatch,
    **{name: getattr(jax_cp_dispatch, name) for name in NAMESPACES},
    "plots": plots,
}


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_mentioned(module):
    text = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    absent = [name for name in MODULES[module].__all__ if not re.search(rf"\b{name}\b", text)]
    assert not absent
