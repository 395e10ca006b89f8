"""Interprets `causal` and `window`: how many tokens before and after itself a query attends to."""

import operator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# Tokens up to the query, itself included; or tokens before it and after it, None for no limit.
Window: TypeAlias = int | tuple[int | None, int | None]


class Reach(NamedTuple):
    """A query at p attends to tokens p - left, ..., p + right of its document; None: no limit."""

    left: int | None
    right: int | None

    @property
    def num_keys(self) -> int | None:
        """The largest number of keys that a query attends to."""
        return None if self.left is None or self.right is None else self.left + 1 + self.right

    def clipped(self, most: int) -> "Reach":
        """Returns the same reach for sequences of at most `most` tokens, without overflow."""
        return Reach(*(None if x is None else min(x, most) for x in self))


def check_causal(op: str, causal: Any) -> bool:
    """Requires True or False; other truthy or falsy values are rejected."""
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"{op}: causal is {causal!r}; it needs to be True or False.")
    return bool(causal)


def reach(op: str, causal: Any, window: Any) -> Reach:
    """Returns the reach that the arguments `causal` and `window` of `op` describe."""
    causal, window = check_causal(op, causal), check_window(op, window)
    if window is None:
        return Reach(None, 0 if causal else None)
    if causal and isinstance(window, Reach):
        raise ValueError(
            f"{op}: window is {tuple(window)} with causal=True; a pair (left, right) is for "
            "causal=False. Pass an int, which counts the tokens up to the query, itself included."
        )
    if isinstance(window, Reach):
        return window
    if not causal:
        raise ValueError(
            f"{op}: window is {window} with causal=False; it needs to be a pair (left, right): the "
            "number of tokens before and after itself to which a query attends."
        )
    return Reach(window - 1, 0)


def check_window(op: str, window: Any) -> int | Reach | None:
    """Requires a number of tokens, a pair, or None; does not compare it with `causal`."""
    if window is None:
        return None
    if isinstance(window, tuple) and len(window) == 2:
        return Reach(*(_tokens(op, window, x, least=0) for x in window))
    return _tokens(op, window, window, least=1)


def _tokens(op: str, window: Any, value: Any, *, least: int) -> Any:
    if value is None:
        return None
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(
            f"{op}: window is {window!r}; it needs to be an int, a pair (left, right) of ints or "
            "None, or None."
        )
    if number < least:
        what = "to be at least 1" if least else "two numbers of at least 0; None is no limit"
        raise ValueError(f"{op}: window is {window!r}; it needs {what}.")
    return number
