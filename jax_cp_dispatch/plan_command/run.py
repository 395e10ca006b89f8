"""Arguments and steps of `python -m jax_cp_dispatch plan`."""

import argparse
import dataclasses
import json
import pathlib

from jax_cp_dispatch._command import InputError, check_number, end_command
from jax_cp_dispatch._progress import Progress
from jax_cp_dispatch._text import paragraph
from jax_cp_dispatch.cost import HARDWARE, Hardware, Workload
from jax_cp_dispatch.plan_command.as_json import as_json
from jax_cp_dispatch.plan_command.batch import Batch, fill_ranks
from jax_cp_dispatch.plan_command.compare import Comparison, compare
from jax_cp_dispatch.plan_command.lengths import read_lengths
from jax_cp_dispatch.plan_command.mask import FORMS, MaskOfArrays, read_mask_text
from jax_cp_dispatch.plan_command.report import report, summary
from jax_cp_dispatch.plots import plot_plan, plot_timeline
from jax_cp_dispatch.plots.figure import figure_class

_MOST_RANKS = 2**14  # these counts then take some gigabytes
# With these, costs and counts stay below 2**63.
_LARGEST = {
    2**31 - 1: ("tokens_per_rank",),
    2**16: ("heads", "kv_heads", "head_size"),
    _MOST_RANKS: ("nodes",),
    16: ("itemsize",),
}
_STEPS = 3  # of one comparison; see `compare`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=pathlib.Path,
        metavar="FILE",
        help="document lengths as JSON (a list, or a list of lists: one per batch row), or segment "
        "ids as .npy or .npz",
    )
    parser.add_argument("--ranks", default="8", help="one number, or several: 8,32,128 (default 8)")
    parser.add_argument(
        "--tokens-per-rank",
        type=int,
        help="tokens of a batch row on a rank; documents that exceed the ranks are cut or left out "
        "(default: all documents fit)",
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key heads (default 8)")
    parser.add_argument("--head-size", type=int, default=128, help="default 128")
    parser.add_argument(
        "--itemsize", type=int, default=2, help="bytes of an element of q (default 2)"
    )
    parser.add_argument("--mask", default="causal", help=f"{FORMS} (default causal)")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h100", help="default h100")
    parser.add_argument(
        "--nodes",
        type=int,
        help="nodes among which the ranks are divided (default: as the hardware)",
    )
    parser.add_argument("--forward", action="store_true", help="predict the forward pass only")
    parser.add_argument("--join", action="store_true", help="put all documents into one batch row")
    parser.add_argument(
        "--row",
        type=int,
        metavar="N",
        help="plan only the N-th batch row, from 0: for files of separate batches",
    )
    parser.add_argument(
        "--describe", action="store_true", help="also describe both plans: traffic, heaviest ranks"
    )
    parser.add_argument(
        "--pictures",
        type=pathlib.Path,
        metavar="FOLDER",
        help="draw work, traffic and the predicted timeline into this folder",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON on standard output, with units in its keys"
    )


def main(options: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 2 if the input is not usable."""
    return end_command("plan", _run, options)


def _run(options: argparse.Namespace) -> int:
    all_ranks = _numbers_of_ranks(options.ranks)
    _check_sizes(options)
    machines = [_hardware(options, num_ranks) for num_ranks in all_ranks]
    if options.pictures is not None:
        _check_pictures(options.pictures)
    per_rank = options.tokens_per_rank
    found = read_lengths(options.file, join=options.join, row=options.row)
    mask = read_mask_text(options.mask, options.file, row=options.row)
    if options.join and isinstance(mask, MaskOfArrays):
        raise InputError(
            f"got --join and --mask {mask.name}, whose arrays number columns. Omit one."
        )
    batches = [
        fill_ranks(found.rows, num_ranks=num_ranks, tokens_per_rank=per_rank)
        for num_ranks in all_ranks
    ]
    if not options.json:
        print(f"{paragraph(found.understood, indent=0)}\n", flush=True)
    progress = Progress(_STEPS * len(all_ranks))
    done: list[tuple[Comparison, Batch]] = []
    for num_ranks, hardware, batch in zip(all_ranks, machines, batches, strict=True):
        tokens = batch.tokens_per_rank
        workload = Workload(
            num_ranks=num_ranks,
            tokens_per_rank=tokens,
            num_heads=options.heads,
            num_kv_heads=options.kv_heads,
            head_size=options.head_size,
            itemsize=options.itemsize,
            lengths=batch.rows,
            mask=mask.of(num_ranks * tokens) if isinstance(mask, MaskOfArrays) else mask,
        )
        comparison = compare(
            workload,
            hardware,
            with_backward=not options.forward,
            step=lambda what, n=num_ranks: progress.step(f"{n} ranks: {what}"),
        )
        done.append((comparison, batch))
        if not options.json:
            _show(comparison, batch, options)
        if options.pictures is not None:
            _draw(comparison, options.hardware, options.pictures)
    if options.json:
        given = {"hardware": options.hardware, "forward": options.forward}
        print(json.dumps(as_json(done, understood=found.understood, **given), indent=2))
    elif len(done) > 1:
        print(summary([comparison for comparison, _ in done]))
    return 0


def _show(comparison: Comparison, batch: Batch, options: argparse.Namespace) -> None:
    print(report(comparison, batch, options.hardware))
    if options.describe:
        print(f"\n{comparison.balanced.describe()}\n\n{comparison.placement.describe()}")
    print(flush=True)


def _numbers_of_ranks(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise InputError(f"--ranks is {text!r}; pass one number, or several such as 8,32,128.")
    if max(numbers) > _MOST_RANKS:
        raise InputError(
            f"--ranks is {text!r}; plans count rows between all pairs of ranks, so pass at most "
            f"{_MOST_RANKS}."
        )
    return numbers


def _check_sizes(options: argparse.Namespace) -> None:
    if options.join and options.row is not None:
        raise InputError("got --join and --row. Pass one of them.")
    for most, names in _LARGEST.items():
        for name in names:
            option = f"--{name.replace('_', '-')}"
            check_number(option, getattr(options, name), minimum=1, maximum=most)
    if options.heads % options.kv_heads:
        raise InputError(
            f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}. Pass a "
            "number of key heads that divides the query heads."
        )


def _hardware(options: argparse.Namespace, num_ranks: int) -> Hardware:
    hardware = HARDWARE[options.hardware]
    if options.nodes is not None:
        if num_ranks % options.nodes:
            raise InputError(
                f"--nodes {options.nodes} does not divide {num_ranks} ranks. Pass a divisor of "
                "every number of ranks."
            )
        if options.nodes > 1 and hardware.rail_bandwidth <= 0:
            raise InputError(
                f"--hardware {options.hardware} has no links between nodes. Omit --nodes, or pass "
                "other hardware."
            )
        return dataclasses.replace(hardware, ranks_per_node=num_ranks // options.nodes)
    size = min(hardware.ranks_per_node or num_ranks, num_ranks)
    if num_ranks % size:
        raise InputError(
            f"{num_ranks} ranks cannot be divided into {options.hardware} nodes of {size}. Pass "
            f"--nodes, or a multiple of {size} as --ranks."
        )
    return hardware


def _check_pictures(folder: pathlib.Path) -> None:
    try:
        figure_class("--pictures")
        folder.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(
            f"cannot create the folder {folder}: {error.strerror}. Pass another --pictures."
        ) from None


def _draw(comparison: Comparison, hardware_name: str, folder: pathlib.Path) -> None:
    n = comparison.workload.num_ranks
    passes = "forward and backward" if comparison.with_backward else "forward"
    plot_plan(comparison.balanced, folder / f"balanced_{n}.png")
    plot_plan(comparison.placement, folder / f"placed_{n}.png")
    plot_timeline(
        comparison.steps,
        folder / f"timeline_{n}.png",
        title=f"one layer, {passes}, on {n} ranks ({hardware_name})",
        rearrangement=comparison.rearrangement,
    )
