"""Arguments and steps of `python -m jax_cp_dispatch plan`."""

import argparse
import dataclasses
import pathlib
import re
from typing import Any

from jax_cp_dispatch import masks
from jax_cp_dispatch._command import InputError, check_number, end_command
from jax_cp_dispatch._text import Progress
from jax_cp_dispatch.attention import Balanced, Placed
from jax_cp_dispatch.attention.algorithms.by_plan import moves_of_plan
from jax_cp_dispatch.attention.choose import candidates, choose_for
from jax_cp_dispatch.cost import HARDWARE, Hardware, Workload
from jax_cp_dispatch.plan_command.batch import fill_ranks, read_lengths
from jax_cp_dispatch.plan_command.report import batch_lines, comparison
from jax_cp_dispatch.plots import figure_class, plot_plan, plot_timeline

_MOST_RANKS = 2**14  # these counts then take some gigabytes
# With these, costs and counts stay below 2**63.
_LARGEST = {
    2**31 - 1: ("tokens_per_rank",),
    2**16: ("heads", "kv_heads", "head_size"),
    _MOST_RANKS: ("ranks", "nodes"),
    16: ("itemsize",),
}


def _has_tokens(kind: Any) -> bool:
    return any(x.default is dataclasses.MISSING for x in dataclasses.fields(kind))


_KINDS = (getattr(masks, name) for name in masks.__all__)
_MASKS: dict[str, Any] = {  # by names such as sliding_window
    re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind
    for kind in _KINDS
    if issubclass(kind, masks.StaticMask) and kind is not masks.StaticMask
}
_FORMS = ", ".join(name + ":TOKENS" * _has_tokens(kind) for name, kind in _MASKS.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=pathlib.Path,
        metavar="FILE",
        help="document lengths as JSON (a list, or a list of lists: one per batch row), or segment "
        "ids as .npy",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=8, help="default 8")
    add(
        "--tokens-per-rank",
        type=int,
        help="tokens of a batch row on a rank; documents that exceed the ranks are cut or left out "
        "(default: all documents fit)",
    )
    add("--heads", type=int, default=32, help="query heads (default 32)")
    add("--kv-heads", type=int, default=8, help="key heads (default 8)")
    add("--head-size", type=int, default=128, help="default 128")
    add("--itemsize", type=int, default=2, help="bytes of an element of q (default 2)")
    add("--mask", default="causal", help=f"{_FORMS} (default causal)")
    add("--hardware", choices=sorted(HARDWARE), default="h100", help="default h100")
    add(
        "--nodes",
        type=int,
        help="nodes among which the ranks are divided (default: as the hardware)",
    )
    add("--forward", action="store_true", help="predict the forward pass only")
    add(
        "--row",
        type=int,
        metavar="N",
        help="plan only the N-th batch row, from 0: for files of separate batches",
    )
    add("--describe", action="store_true", help="also describe both plans: traffic, heaviest ranks")
    add(
        "--pictures",
        type=pathlib.Path,
        metavar="FOLDER",
        help="draw work, traffic and the predicted timeline into this folder",
    )


def main(options: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 2 if the input is not usable."""
    return end_command("plan", _run, options)


def _run(options: argparse.Namespace) -> int:
    _check_sizes(options)
    hardware, mask, num_ranks = _hardware(options), _mask(options.mask), options.ranks
    if options.pictures is not None:
        _check_pictures(options.pictures)
    batch = fill_ranks(
        read_lengths(options.file, options.row),
        num_ranks=num_ranks,
        tokens_per_rank=options.tokens_per_rank,
    )
    workload = Workload(
        num_ranks=num_ranks,
        tokens_per_rank=batch.tokens_per_rank,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_size=options.head_size,
        itemsize=options.itemsize,
        lengths=batch.rows,
        mask=mask,
    )
    progress = Progress(3)
    with progress.step("moving queries"):
        balanced = Balanced().plan_for(workload, hardware)
    with progress.step("placing tokens"):
        placed = Placed().placement_for(workload, hardware)
    with progress.step("predicting times"):
        plans = {Balanced(): balanced, Placed(): placed.plan}
        moves = {
            x: moves_of_plan(plans.get(x), hardware)
            for x in candidates(workload, hardware, can_place=True)
        }
        with_backward = not options.forward
        choice, seconds = choose_for(
            workload, moves, hardware=hardware, with_backward=with_backward
        )
        steps = {
            x.label: [
                step
                for backward in (False, True)[: 1 + with_backward]
                for step in x.step_costs(workload, hardware=hardware, backward=backward, moves=rows)
            ]
            for x, rows in moves.items()
        }
    num_nodes = num_ranks // hardware.node_size(num_ranks)
    print(*batch_lines(batch, workload, num_nodes), sep="\n")
    print(
        f"  work       max/mean {float(balanced.imbalance_before):.3f} before planning; "
        f"{float(balanced.imbalance):.3f} balanced, {float(placed.plan.imbalance):.3f} placed\n"
    )
    named = "forward" if options.forward else "forward and backward"
    print(comparison(choice, seconds, steps, passes=named, num_nodes=num_nodes))
    if options.describe:
        of_algorithms = filter(None, (x.describe(workload) for x in moves))
        print(f"\n{balanced.describe()}", placed.describe(), *of_algorithms, sep="\n\n")
    if options.pictures is not None:
        plot_plan(balanced, options.pictures / "balanced.png")
        plot_plan(placed, options.pictures / "placed.png")
        plot_timeline(
            steps,
            options.pictures / "timeline.png",
            title=f"one layer, {named}, on {num_ranks} ranks ({options.hardware})",
            rearrangement={x: seconds[x] - y.total for x, y in choice.predictions.items()},
        )
    return 0


def _mask(text: str) -> masks.StaticMask:
    name, _, tokens = text.partition(":")
    kind: Any = _MASKS.get(name)
    is_number = tokens.isdecimal() and 0 < int(tokens) < 2**31
    if kind is None or (not is_number if _has_tokens(kind) else ":" in text):
        raise InputError(
            f"--mask is {text!r}; pass one of {_FORMS}, for example --mask sliding_window:4096. "
            "For masks of arrays, call choose_algorithm."
        )
    return kind(int(tokens)) if tokens else kind()


def _check_sizes(options: argparse.Namespace) -> None:
    for most, names in _LARGEST.items():
        for name in names:
            option = f"--{name.replace('_', '-')}"
            check_number(option, getattr(options, name), minimum=1, maximum=most)
    if options.heads % options.kv_heads:
        raise InputError(
            f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}. Pass a "
            "number of key heads that divides the query heads."
        )


def _hardware(options: argparse.Namespace) -> Hardware:
    hardware, num_ranks = HARDWARE[options.hardware], options.ranks
    if options.nodes is not None:
        if num_ranks % options.nodes:
            raise InputError(
                f"--nodes {options.nodes} does not divide {num_ranks} ranks. Pass a divisor."
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
