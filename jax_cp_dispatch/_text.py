"""Text for people: numbers, tables, plans and routings in words, warnings at the user's line."""

import dataclasses
import functools
import sys
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float32, Float64, Int, Int64

from jax_cp_dispatch._arguments import host_value

WIDTH = 100

Number: TypeAlias = int | float | np.integer | np.floating
_PREFIXES = ("", *"KMGTP")
_UNITS = ((1, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns"))


def outline(self: Any) -> str:
    """A `__repr__` for a dataclass or a NamedTuple: arrays are dtype and shape, int32[4,8]."""
    if isinstance(self, type):
        return self.__name__
    if dataclasses.is_dataclass(self):
        names = [field.name for field in dataclasses.fields(self)]
    elif hasattr(self, "_fields"):
        names = self._fields
    elif hasattr(self, "dtype") and hasattr(self, "shape"):
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
    else:
        return repr(self)
    fields = (f"{name}={outline(getattr(self, name))}" for name in names)
    return f"{type(self).__name__}({', '.join(fields)})"


def short_count(number: Number) -> str:
    """Returns a count in at most five characters: 65536 as "65.5K"."""
    is_short = number < 9999.5
    return str(round(number)) if is_short else byte_count(number)[:-1].replace(" ", "")


def byte_count(number: Number) -> str:
    """Returns 65536 as "65.5 KB"."""
    power = 0
    while number >= 999.5 and power < len(_PREFIXES) - 1:
        number, power = number / 1000, power + 1
    digits = 0 if number >= 99.95 or not power else 1
    return f"{number:.{digits}f} {_PREFIXES[power]}B"


def duration(seconds: float | np.floating) -> str:
    """Returns 0.0016 as "1.60 ms"."""
    scale, unit = next(((x, y) for x, y in _UNITS if seconds * x >= 0.9995), _UNITS[-1])
    value = seconds * scale
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, indent: int = 2) -> str:
    """Aligns columns: the first to the left, all others to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        " " * indent
        + "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def paragraph(text: str, *, indent: int = 2) -> str:
    """Wraps a text to the width of a page."""
    margin = " " * indent
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(margin + line for line in lines)


# ---- Plans and routings in words.


def known(op: str, value: Any) -> np.ndarray:
    """Returns an array's values; raises TypeError if they are not known on this host."""
    found = host_value(value)
    if found is None:
        raise TypeError(
            f"{op}: the plan is traced, or on other hosts. Call it outside jit, on a host that has "
            "the plan of all ranks."
        )
    return found


def rows_between_ranks(op: str, metadata: Any) -> Int[np.ndarray, "W W"]:
    """Returns the rows that each rank (first axis) sends to each (second axis), and keeps.

    A traced plan, and one rank's part of a plan, are errors.
    """
    received = known(op, metadata.num_recv_tokens)
    if received.ndim != 2 or len(received) != metadata.world_size:
        raise ValueError(
            f"{op}: num_recv_tokens has shape {list(received.shape)} but the plan of all "
            f"{metadata.world_size} ranks has [{metadata.world_size}, {metadata.world_size + 1}]. "
            "Call it on that plan; of stacked plans, on one of them."
        )
    return received[:, : metadata.world_size].T.astype(np.int64)


def describe_metadata(metadata: Any) -> str:
    op, num_ranks = "Metadata.describe", metadata.world_size
    tokens = known(op, metadata.seq_len)
    if tokens.ndim > 1:
        sent = rows_between_ranks(op, metadata)
        in_use, slots = known(op, metadata.num_seqs), tokens.shape[1]
        used = f"at most {in_use.max():,} of {slots:,} in use (rank {in_use.argmax()})"
        rows = f"{sent.sum():,} received; {_away(sent):,} of them from another rank"
        lines = [("rows", rows), ("slots", used)]
        return _describe(f"Metadata: {num_ranks} ranks", lines, {}, {"rows": sent})
    received = known(op, metadata.num_recv_tokens)[:-1].astype(np.int64)
    target = known(op, metadata.dst_rank)
    moved = np.broadcast_to(tokens.reshape(-1, *[1] * (target.ndim - 1)), target.shape)
    sent = np.zeros(num_ranks, np.int64)
    np.add.at(sent, target[target >= 0], moved[target >= 0])
    lines = [("sends", f"{sent.sum():,} rows"), ("receives", f"{received.sum():,} rows")]
    loads = {"rows to a rank": sent, "rows from a rank": received}
    return _describe(f"Metadata: the view of one of {num_ranks} ranks", lines, loads, {})


def describe_plan(
    op: str,
    plan: Any,
    *,
    speeds: Sequence[float] | None = None,
    ranks_per_node: int | None = None,
) -> str:
    """Returns the text of a `describe` method, `op`, of a plan of all ranks.

    Relative `speeds` of the ranks determine their shares of the work. With `ranks_per_node`, keys
    between nodes are counted.
    """
    computed = known(op, plan.num_rows).astype(np.int64)
    if computed.min() < 0:
        return f"{plan.reason} Nothing was planned."
    moves, sizes = {"keys": rows_between_ranks(op, plan.kv_metadata)}, {"keys": plan.kv_capacity}
    if not plan.is_placed:
        moves = {"queries": rows_between_ranks(op, plan.q_metadata), **moves}
        sizes["queries"] = plan.q_capacity
    num_ranks, all_tokens = plan.world_size, plan.world_size * plan.num_tokens
    pairs = known(op, plan.pairs).astype(float)
    before, after = (work_by_share(known(op, x), speeds) for x in (plan.pairs_before, plan.pairs))
    relative = "" if speeds is None else " relative to the ranks' speeds"
    work = (
        f"{pairs.sum():.3e} query-key pairs; max/mean {after.max():.3f}{relative} "
        f"(before planning {before.max():.3f}, on rank {before.argmax()})"
    )
    padding = all_tokens - computed.sum()
    lines = [
        ("work", work),
        ("tokens", f"{computed.sum():,} queries, {padding:,} padding"),
    ]
    per_token = lambda rows: f"({rows / max(all_tokens, 1):.3f} per token)"
    for what, sent in moves.items():
        lines.append((what, f"{_away(sent):,} move {per_token(_away(sent))}"))
    if ranks_per_node is not None:
        _, away = plan.num_tokens_moved_between_nodes(ranks_per_node)
        text = f"{away:,} keys move between nodes of {ranks_per_node} ranks"
        lines.append(("nodes", f"{text} {per_token(away)}"))
    for what, sent in moves.items():
        need, size = sent.sum(0), sizes[what]
        used = f"at most {need.max():,} rows of {what} on rank {need.argmax()}"
        lines.append(("capacity", f"{used}; {need.max() / size:.0%} of {size:,}"))
    part = "mean" if speeds is None else "share"
    shares = {f"work / {part} before planning": before, f"work / {part} as planned": after}
    title = f"{op.partition('.')[0]}: {num_ranks} ranks of {plan.num_tokens:,} tokens"
    return _describe(title, lines, shares | {"queries computed": computed}, moves)


def describe_routing(op: str, routing: Any) -> str:
    rows = rows_of_experts(op, routing)
    num_ranks, num_places = rows.shape
    num_tokens, num_choices = routing.row.shape
    sent, load = rows_between_ranks(op, routing), rows.sum(1)
    need = known(op, routing.num_rows).astype(np.int64)
    dropped, all_rows = int(known(op, routing.num_dropped).sum()), int(need.sum())
    lines = [
        ("rows", f"{load.sum():,} for experts; max/mean {imbalance(load):.3f} of the "
         f"ranks (rank {load.argmax()}), {imbalance(rows):.3f} of the experts (place "
         f"{rows.argmax()})"),
        ("capacity", f"at most {need.max():,} rows needed on rank {need.argmax()}; "
         f"{need.max() / routing.capacity:.0%} of {routing.capacity:,}"),
        ("dropped", f"{dropped:,} choices ({dropped / max(all_rows, 1):.1%})"),
        ("tokens", f"{_away(sent):,} move to another rank "
         f"({_away(sent) / max(num_tokens, 1):.3f} per token), where they have "
         f"{load.sum() / max(int(sent.sum()), 1):.3f} rows each"),
    ]  # fmt: skip
    title = (
        f"Routing: {num_ranks} ranks of {num_places} experts, {num_tokens:,} tokens of "
        f"{num_choices} choices"
    )
    return _describe(title, lines, {"rows of experts": load, "rows needed": need}, {"tokens": sent})


def rows_of_experts(op: str, routing: Any) -> Int64[np.ndarray, "W L"]:
    """Returns the rows of each expert of each rank; traced values and a rank's part are errors."""
    rows_between_ranks(op, routing)  # of all ranks?
    return known(op, routing.group_sizes).reshape(routing.world_size, -1).astype(np.int64)


def imbalance(load: Any) -> float:
    """Returns the most divided by the mean; 1 if there is nothing."""
    return float(load.max() / load.mean()) if load.any() else 1.0


def describe_mask(layers: int, all_layers: int, plan: Any) -> str:
    """Returns the line of a further mask of a placement."""
    moved = plan.num_kv_tokens_moved
    return (
        f"            {plan.mask}, {layers} of {all_layers} layers: max/mean {plan.imbalance:.3f}; "
        f"{moved:,} keys move"
    )


def by_group(
    texts: Sequence[str], pairs: Float32[np.ndarray, "groups W"], speeds: Sequence[float] | None
) -> str:
    """Joins the texts of groups, which share no work: its balance inside a group, and of all."""
    inside = work_by_share(pairs, speeds).max()
    every = work_by_share(pairs.reshape(-1), None if speeds is None else len(pairs) * tuple(speeds))
    group, rank = divmod(int(every.argmax()), pairs.shape[1])
    first = (
        f"{len(texts)} groups: max/mean {inside:.3f} inside a group, {every.max():.3f} of all "
        f"ranks (rank {rank} of group {group})"
    )
    parts = [f"Group {n} of {len(texts)}\n{text}" for n, text in enumerate(texts)]
    return "\n\n".join([first, *parts])


def work_by_share(pairs: Any, speeds: Sequence[float] | None) -> Float64[np.ndarray, "*groups W"]:
    """Returns the work of each rank, divided by its share of all work; 1 if there is none."""
    pairs = np.asarray(pairs, np.float64)
    of_ranks = np.ones(pairs.shape[-1]) if speeds is None else np.array(speeds)
    share = pairs.sum(-1, keepdims=True) * of_ranks / of_ranks.sum()
    return np.divide(pairs, share, out=np.ones_like(pairs), where=share > 0)


def exceeded(capacities: Mapping[str, int], needs: Any) -> str:
    """Returns in words which capacities the largest needs exceed."""
    largest = np.asarray(needs).reshape(-1, len(capacities)).max(0).tolist()
    values = zip(capacities.items(), largest, strict=True)
    texts = [f"{name} {size}: it needs {need}" for (name, size), need in values if need > size]
    return "; ".join(texts) or "a constraint of its config"


def _describe(
    title: str,
    lines: Sequence[tuple[str, str]],
    loads: Mapping[str, np.ndarray],
    moves: Mapping[str, Int[np.ndarray, "W W"]],
) -> str:
    """Returns a title, lines of a name and a text, and tables of loads and moves.

    Loads are those of each rank; fractions have three digits. Moves are rows from each rank to
    each, by what they are.
    """
    loads = dict(loads)
    for what, sent in moves.items():
        kept = np.diag(sent)
        loads[f"{what} kept"] = kept
        loads[f"{what} sent to others"] = sent.sum(1) - kept
        loads[f"{what} received from others"] = sent.sum(0) - kept
    of_ranks = []
    for name, x in loads.items():
        digits = 3 if x.dtype.kind == "f" else 0
        values = (f"{f(x):,.{digits}f}" for f in (np.min, np.median, np.max))
        of_ranks.append([name, *values, str(np.argmax(x))])
    parts = [title, *(f"  {name:<9} {text}" for name, text in lines)]
    parts += ["", table(("", "least", "median", "most", "on rank"), of_ranks)]
    for what, sent in moves.items():
        parts += ["", _describe_traffic(what, sent)]
    return "\n".join(parts)


def _away(sent: Int[np.ndarray, "W W"]) -> int:
    """Returns the rows that go to another rank."""
    return int(sent.sum() - np.trace(sent))


_LARGEST_MATRIX = 12  # ranks; its lines then have at most 100 characters
_NUM_PAIRS = 8


def _describe_traffic(what: str, sent: Int[np.ndarray, "W W"]) -> str:
    """Returns a matrix of the rows between ranks, or of many ranks the pairs with most rows."""
    num_ranks = len(sent)
    away = sent - np.diag(np.diag(sent))
    pairs = int(np.count_nonzero(away))
    if not pairs:
        return f"  No {what} move between ranks."
    if num_ranks <= _LARGEST_MATRIX:
        header = ["from \\ to", *map(str, range(num_ranks))]
        cells = [[short_count(x) if x else "." for x in of_rank] for of_rank in sent]
        title = f"  {what.capitalize()} from each rank to each; on the diagonal those that stay"
        rows = [[str(rank), *of_rank] for rank, of_rank in enumerate(cells)]
        return f"{title}\n{table(header, rows, indent=4)}"
    order = np.argsort(-away, axis=None, kind="stable")[: min(_NUM_PAIRS, pairs)]
    shown = list(zip(*np.unravel_index(order, away.shape), strict=True))
    rows = [[f"rank {i} to rank {j}", f"{away[i, j]:,}"] for i, j in shown]
    share = sum(away[i, j] for i, j in shown) / away.sum()
    title = f"  {what.capitalize()} move between {pairs:,} pairs of ranks; the largest"
    rest = f"    These are {share:.0%} of all {what} that move."
    return f"{title}\n{table(('', what), rows, indent=4)}\n{rest}"


# ---- Warnings.

# Modules between the user's line and a warning: a traced or lowered call passes through JAX.
_SKIPPED = {"jax_cp_dispatch", "jax", "jaxlib", "contextlib", "functools", "jaxtyping", "beartype"}


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside this package and JAX."""
    frame, level = sys._getframe(1), 2
    package = lambda frame: frame.f_globals.get("__name__", "").partition(".")[0]
    while frame.f_back is not None and package(frame) in _SKIPPED:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@functools.lru_cache(maxsize=16)
def say_once(message: str) -> None:
    """Warns of something that this package chose, once per process."""
    warn_caller(f"jax_cp_dispatch: {message}")
