"""Plans causal attention of a batch from its document lengths. Compares work, moved rows and bytes
of each layout, and the predicted times of all algorithms."""

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_cp_dispatch import masks
from jax_cp_dispatch._text import byte_count, duration, paragraph, table
from jax_cp_dispatch.attention import Balanced, Choice, Placed
from jax_cp_dispatch.attention.algorithms.planned import moves_of_plan
from jax_cp_dispatch.attention.choose import candidates, choose_for
from jax_cp_dispatch.cost import HARDWARE, Hardware, StepCost, Workload
from jax_cp_dispatch.documents.table import document_lengths
from jax_cp_dispatch.plots import figure_class, plot_plan, plot_timeline
from jax_cp_dispatch.tools import InputError, Progress, at_most
from jax_cp_dispatch.tools.programs import lengths_in

HELP = "compare layouts and algorithms for your document lengths"
_MOST_ROWS = 2**31 - 1
# With these, costs and counts stay below 2**63.
_MOST_RANKS, _MOST_HEADS = 2**14, 2**16  # counts of so many ranks take some gigabytes


def _has_tokens(kind: Any) -> bool:
    return any(x.default is dataclasses.MISSING for x in dataclasses.fields(kind))


_KINDS = (getattr(masks, name) for name in masks.__all__)
_MASKS: dict[str, Any] = {  # by names such as sliding_window
    re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind
    for kind in _KINDS
    if isinstance(kind, type) and issubclass(kind, masks.StaticMask)
    if kind is not masks.StaticMask
}
_FORMS = ", ".join(name + ":TOKENS" * _has_tokens(kind) for name, kind in _MASKS.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    path, size = pathlib.Path, at_most(_MOST_HEADS)

    def add(name: str, what: str, kind: Any = size, **more: Any) -> None:
        default = more.get("default")
        shown = "" if default is None else f"{', ' * bool(what)}default {default}"
        parser.add_argument(name, type=kind, help=what + shown, **more)

    lengths = "document lengths as JSON (a list, or a list of lists: one per batch row), or segment"
    add("file", f"{lengths} ids as .npy", path, metavar="FILE")
    add("--ranks", "", at_most(_MOST_RANKS), default=8)
    tokens = "tokens of a batch row on a rank; what exceeds the ranks is cut off"
    add("--tokens-per-rank", f"{tokens} (default: all documents fit)", at_most(_MOST_ROWS))
    add("--heads", "query heads", default=32)
    add("--kv-heads", "key heads", default=8)
    add("--head-size", "", default=128)
    add("--itemsize", "bytes of an element of q", at_most(16), default=2)
    add("--mask", _FORMS, str, default="causal")
    add("--hardware", "", str, choices=sorted(HARDWARE), default="h100")
    nodes = "nodes among which the ranks are divided (default: as the hardware)"
    add("--nodes", nodes, at_most(_MOST_RANKS))
    row = "plan only the N-th batch row, from 0: for files of separate batches"
    add("--row", row, int, metavar="N")
    pictures = "draw work, traffic and the predicted timeline into this folder"
    add("--pictures", pictures, path, metavar="FOLDER")
    for flag, what in (
        ("--forward", "predict the forward pass only"),
        ("--describe", "also describe both plans: traffic, heaviest ranks"),
    ):
        parser.add_argument(flag, action="store_true", help=what)


def run(options: argparse.Namespace) -> int:
    if options.heads % options.kv_heads:
        raise InputError(
            f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}. Pass a "
            "number of key heads that divides the query heads."
        )
    hardware, mask = _hardware(options), _mask(options.mask)
    if options.pictures is not None:
        _make_folder(options.pictures)
    given = read_lengths(options.file, options.row)
    lengths, tokens_per_rank = fill_ranks(given, options)
    heads = options.heads, options.kv_heads, options.head_size
    sizes = options.ranks, tokens_per_rank, *heads, options.itemsize
    workload = Workload(*sizes, lengths=lengths, mask=mask)
    progress, with_backward = Progress(3), not options.forward
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
    passes = "forward and backward" if with_backward else "forward"
    num_nodes = options.ranks // hardware.node_size(options.ranks)
    _print_batch(given, workload, num_nodes)
    print(
        f"  work       max/mean {float(balanced.imbalance_before):.3f} before planning; "
        f"{float(balanced.imbalance):.3f} balanced, {float(placed.plan.imbalance):.3f} placed\n"
    )
    _print_comparison(choice, seconds, steps, passes, num_nodes)
    if options.describe:
        of_algorithms = filter(None, (x.describe(workload) for x in moves))
        print(f"\n{balanced.describe()}", placed.describe(), *of_algorithms, sep="\n\n")
    if options.pictures is not None:
        plot_plan(balanced, options.pictures / "balanced.png")
        plot_plan(placed, options.pictures / "placed.png")
        plot_timeline(
            steps,
            options.pictures / "timeline.png",
            title=f"one layer, {passes}, on {options.ranks} ranks ({options.hardware})",
            rearrangement={x: seconds[x] - y.total for x, y in choice.predictions.items()},
        )
    return 0


# ---- What the arguments mean.


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


def _hardware(options: argparse.Namespace) -> Hardware:
    hardware, ranks, nodes = HARDWARE[options.hardware], options.ranks, options.nodes
    size = min(hardware.ranks_per_node or ranks, ranks)
    if ranks % (nodes or size):
        parts = f"{nodes} nodes" if nodes else f"{options.hardware} nodes of {size}"
        raise InputError(f"{ranks} ranks cannot be divided into {parts}. Pass other --nodes.")
    if nodes and nodes > 1 and hardware.rail_bandwidth <= 0:
        raise InputError(
            f"--hardware {options.hardware} has no links between nodes. Omit --nodes, or pass "
            "other hardware."
        )
    return dataclasses.replace(hardware, ranks_per_node=ranks // nodes) if nodes else hardware


def _make_folder(folder: pathlib.Path) -> None:
    try:
        figure_class("--pictures")
        folder.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(
            f"cannot create the folder {folder}: {error.strerror}. Pass another --pictures."
        ) from None


def read_lengths(path: pathlib.Path, row: int | None = None) -> Sequence[Sequence[int]]:
    """Returns the lengths of the documents of each batch row of a file, or of one row alone."""
    kind = path.suffix.lower()
    if kind not in (".json", ".npy"):
        raise InputError(
            f"cannot read {path}: its suffix is {kind!r}. Pass lengths in a .json file, or segment "
            "ids in a .npy file."
        )
    try:
        rows = (
            _from_json(path)
            if kind == ".json"
            else document_lengths(np.atleast_2d(np.load(path, allow_pickle=False)))
        )
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}. Pass another file.") from None
    except (EOFError, RecursionError, TypeError, ValueError) as error:
        what = "a list of lengths, such as [700, 200], or a list of such lists, one per batch row"
        needed = what if kind == ".json" else "integer segment ids [T] or [B, T]"
        raise InputError(f"{path} needs {needed}: {str(error)[:200]}.") from None
    if row is not None:
        if not 0 <= row < len(rows):
            raise InputError(f"--row is {row}; pass a batch row of the file, 0 to {len(rows) - 1}.")
        rows = [rows[row]]
    if not any(map(sum, rows)):
        raise InputError(f"{path} has no documents with tokens. Pass lengths of at least 1.")
    return rows


def _from_json(path: pathlib.Path) -> Sequence[Sequence[int]]:
    found = json.loads(path.read_text(encoding="utf-8-sig"))  # editors add a byte order mark
    if not isinstance(found, list) or not found:
        raise ValueError("it holds something else")
    rows = found if isinstance(found[0], list) else [found]
    for x in (x for row in rows for x in row):
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        if not is_number or not 0 <= x < 2**48 or x != int(x):
            raise ValueError(f"{x!r} is no whole number of tokens")
    return [[int(x) for x in row] for row in rows]


def fill_ranks(
    rows: Sequence[Sequence[int]], options: argparse.Namespace
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Returns the lengths that the ranks hold of each batch row, and the tokens of a rank."""
    tokens_per_rank = options.tokens_per_rank or -(-max(map(sum, rows)) // options.ranks)
    if len(rows) * tokens_per_rank > _MOST_ROWS:
        raise InputError(
            f"a rank would hold {len(rows) * tokens_per_rank} tokens, but plans number rows with "
            "32 bits. Pass more --ranks, or a smaller --tokens-per-rank."
        )
    space = options.ranks * tokens_per_rank
    kept = tuple(tuple(lengths_in(row, space).tolist()) for row in rows)
    if sum(x**2 for row in kept for x in row) >= 2**62:
        raise InputError(
            "the documents have more than 2**61 query-key pairs, the most that a plan counts. Pass "
            "shorter documents, or fewer of them."
        )
    return kept, tokens_per_rank


# ---- What is printed.


def _print_batch(given: Sequence[Sequence[int]], workload: Workload, num_nodes: int) -> None:
    lengths = [length for row in workload.rows for length in row]
    rows, num_tokens = workload.rows_per_rank, workload.num_ranks * workload.rows_per_rank
    print(f"{workload.num_ranks} ranks of {rows:,} tokens; nodes: {num_nodes}")
    print(
        f"  documents  {len(lengths):,} of {min(lengths):,} to {max(lengths):,} "
        f"tokens; batch rows: {len(workload.rows):,}"
    )
    print(f"  tokens     {num_tokens:,}; {num_tokens - sum(lengths):,} of them padding")
    if too_many := sum(map(sum, given)) - sum(lengths):
        print(f"  too long   {too_many:,} tokens exceed the ranks; they are cut off")


def _print_comparison(
    choice: Choice,
    seconds: Mapping[str, float],
    steps: Mapping[str, Sequence[StepCost]],
    passes: str,
    num_nodes: int,
) -> None:
    """Prints times and bytes of all algorithms, the fastest first, and the reason of the choice."""
    times = "predicted", "compute", "exchange", "waiting", "work"
    moved = ("inside", "busiest", "between", "busiest") if num_nodes > 1 else ("bytes", "busiest")
    rows = []
    for name in sorted(seconds, key=seconds.__getitem__):
        x, costs = choice.predictions[name], steps[name]
        parts = seconds[name], x.compute, x.communication, x.exposed_communication
        total, between, inside_most, between_most = (
            sum(cost[i] for cost in costs) for i in range(2, 6)
        )
        sent = total - between, inside_most, between, between_most
        mark = "* " if name == choice.algorithm.label else "  "
        rows.append(
            [mark + name, *map(duration, parts), f"{x.imbalance:.2f}"]
            + [byte_count(value) for value in sent[: len(moved)]]
        )
    caption = (
        f"One layer, {passes}: predicted, not measured. Times of zigzag and hamilton include the "
        "rearrangement of contiguous tokens. Waiting is the part of exchanges that is not hidden. "
        "Work: query-key pairs of the slowest ranks of all steps, divided by those of equal work. "
        "Bytes that a rank sends: the mean, and those of the busiest rank."
    )
    print(table(("  algorithm", *times, *moved), rows), paragraph(caption), sep="\n")
    print(f"\n{paragraph('Choice: ' + choice.reason)}")
