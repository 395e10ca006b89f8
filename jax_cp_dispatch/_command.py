"""How a command ends: its exit status, and one line on standard error about unusable input."""

import argparse
import errno
import os
import sys
from collections.abc import Callable

_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS

MOST_DEVICES = 1024
"""Virtual CPU devices of a command; each has threads, and programs take longer to compile."""


class InputError(ValueError):
    """A file or an argument is not usable; the message says what to do."""


def end_command(
    name: str, run: Callable[[argparse.Namespace], int], options: argparse.Namespace
) -> int:
    """Runs a command; returns its status, or 2 if its input is not usable or its output is full."""
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except InputError as error:
        reason = str(error)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _discard_output()
        where = error.filename or "the output"
        reason = f"cannot write {where}: {error.strerror}. Free some space, or write elsewhere."
    print(f"{name}: {reason}", file=sys.stderr)
    return 2


def check_number(name: str, value: int | None, *, minimum: int, maximum: int) -> None:
    """Requires an option in this range, or none."""
    if value is not None and not minimum <= value <= maximum:
        raise InputError(f"{name} is {value}; pass {minimum} to {maximum}.")


def _discard_output() -> None:
    """Python flushes standard output once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
