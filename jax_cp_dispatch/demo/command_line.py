"""The demonstration's arguments, and those that it refuses."""

import argparse
import pathlib
import sysconfig

from jax_cp_dispatch._command import MOST_DEVICES, InputError, check_number
from jax_cp_dispatch.plots.figure import figure_class

_MOST_TOKENS = 2**24  # the sequence is in the memory of this machine several times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=pathlib.Path,
        default=pathlib.Path(sysconfig.get_path("stdlib")),
        help="folder of text files (default: the sources of the Python standard library)",
    )
    parser.add_argument(
        "--pattern",
        default=None,
        help="which files (default: *.py; if a folder is given, all of its files)",
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual CPU devices (default 8)")
    parser.add_argument("--tokens-per-rank", type=int, default=4096, help="default 4096")
    parser.add_argument("--seed", type=int, default=0, help="determines the order of documents")
    parser.add_argument(
        "--picture",
        type=pathlib.Path,
        default=pathlib.Path("plan.png"),
        help="file for the picture of the plan (default plan.png)",
    )


def check_arguments(arguments: argparse.Namespace, pattern: str) -> None:
    """Refuses arguments before anything is computed."""
    if not arguments.folder.is_dir():
        raise InputError(f"{arguments.folder} is not a folder. Name one that holds text files.")
    check_number("--ranks", arguments.ranks, minimum=1, maximum=MOST_DEVICES)
    most = _MOST_TOKENS // arguments.ranks
    check_number("--tokens-per-rank", arguments.tokens_per_rank, minimum=1, maximum=most)
    check_number("--seed", arguments.seed, minimum=0, maximum=2**63 - 1)
    try:
        next(arguments.folder.rglob(pattern), None)
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"--pattern is {pattern!r}: {error}. Pass one such as *.txt.") from None
    _check_picture(arguments.picture)


def _check_picture(path: pathlib.Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"--picture is {path}; it needs to be a file in an existing folder.")
    try:
        kinds = figure_class("--picture")().canvas.get_supported_filetypes()
    except ImportError:
        return  # there will be no picture
    kind = path.suffix.lower().removeprefix(".")
    if kind and kind not in kinds:
        raise InputError(f"--picture is {path}; it needs a suffix such as .png, .pdf or .svg.")
