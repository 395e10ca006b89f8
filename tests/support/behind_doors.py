"""What the tests check at run time: the annotations of all functions, behind the doors."""

import functools
import pathlib
import re
import sys
from typing import Any

from beartype import beartype


def checked(function: Any) -> Any:
    """Checks arguments and results by annotations.

    jaxtyping asks twice: for the arguments, with a result of any type, and, after the call, for
    both. A function with a door checks its arguments itself, in words that tests match.
    """
    is_before = function.__annotations__.get("return") is Any
    if is_before and function.__qualname__ in _with_door(function.__module__):
        return function
    return beartype(function)


@functools.cache
def _with_door(module: str) -> set[str]:
    """Returns the names of the functions of a module that have the decorator."""
    source = pathlib.Path(sys.modules[module].__file__ or "").read_text()
    return set(re.findall(r"^@door\((?:.*\)|\n(?: .*\n)*\))\n(?:@.*\n)*def (\w+)", source, re.M))
