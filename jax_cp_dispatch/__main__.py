"""`python -m jax_cp_dispatch COMMAND`: the demonstration, the doctor, plans, the bench."""

import argparse
import errno
import os
import sys
from typing import NoReturn

from jax_cp_dispatch.tools import InputError, bench, demo, doctor, plan

_COMMANDS = {"demo": demo, "doctor": doctor, "plan": plan, "bench": bench}
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the list of all."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def main() -> int:
    """Returns the status of a command, or 2 if its input is not usable or its output is full."""
    parser = _Parser(
        prog="python -m jax_cp_dispatch",
        description=__doc__,
        epilog="python -m jax_cp_dispatch.launch runs a program in several processes of this host.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add_arguments(
            commands.add_parser(name, help=module.HELP, description=module.__doc__)
        )
    options = parser.parse_args()
    try:
        status = _COMMANDS[options.command].run(options)
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
    print(f"{options.command}: {reason}", file=sys.stderr)
    return 2


def _discard_output() -> None:
    """Python flushes standard output once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
