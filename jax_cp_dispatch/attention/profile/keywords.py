"""Reads the keywords of the profiled function."""

from __future__ import annotations

from typing import Any

from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention.options import AttentionOptions

_EXCHANGE = {"implementation", "deadline"}
_DOCUMENTS = ("segment_ids", "positions")


def read_keywords(
    op: str, axis_name: str, given: dict[str, Any], names: set[str]
) -> tuple[Any, tuple[Any, ...], AttentionOptions]:
    """Returns the mask, segment ids and positions, and the options, which `names` lists.

    Raises:
      TypeError: the function has no such keyword.
    """
    if unknown := given.keys() - names - _EXCHANGE - {"mask", *_DOCUMENTS}:
        function = op.removesuffix("_profile")
        raise TypeError(
            f"{op}: got {', '.join(sorted(unknown))}; it takes the keywords of {function}."
        )
    exchange = {name: given.get(name) for name in _EXCHANGE}
    others = {name: given[name] for name in names & given.keys()}
    options = AttentionOptions(read_options(op, axis_name, **exchange), **others)
    return given.get("mask"), tuple(given.get(name) for name in _DOCUMENTS), options
