"""Warnings that show the line of the user's program, not of this package or of JAX."""

import functools
import sys
import warnings

# Modules between the user's line and a warning: a traced or lowered call passes through JAX.
_SKIPPED = {"jax_cp_dispatch", "jax", "jaxlib", "contextlib", "functools", "jaxtyping", "beartype"}


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside this package and JAX."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_skipped(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@functools.lru_cache(maxsize=16)
def say_once(message: str) -> None:
    """Warns of something that this package chose, once per process."""
    warn_caller(f"jax_cp_dispatch: {message}")


def _is_skipped(module: str) -> bool:
    return module.partition(".")[0] in _SKIPPED
