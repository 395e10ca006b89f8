"""Programs of the repository that are not in a package, as modules."""

import importlib.util
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


def load(path: str) -> Any:
    """Returns the module of a file, named by its path in the repository."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
