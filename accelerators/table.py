"""Writes the tables of docs/accelerators.md from results.json: python accelerators/table.py."""

import json
import pathlib
from typing import Any

from programs import PROGRAMS_FOR_GPUS
from schedule import EXCHANGE, WORKS
from targets import TARGETS

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent / "docs/accelerators.md"
BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"
DETAILED = ("TPU v5e 2x2", "8 H100")
DETAILED_PROGRAMS = (
    "placed",
    "balanced, planned before",
    "sequence.gated_delta_rule",
    "sequence.linear_attention",
)
Row = dict[str, Any]


def tables(rows: list[Row]) -> str:
    own = [row for row in rows if row["program"] in PROGRAMS_FOR_GPUS]
    rows = [row for row in rows if row["program"] not in PROGRAMS_FOR_GPUS]
    found = {(row["program"], row["target"]): row for row in rows}
    programs = list(dict.fromkeys(row["program"] for row in rows))
    targets = [name for name in TARGETS if any(name == row["target"] for row in rows)]
    reasons: list[str] = []
    states = {
        program: [_state(found.get((program, target)), reasons) for target in targets]
        for program in programs
    }
    everywhere = [name for name in programs if set(states[name]) == {"compiled"}]
    lines = [f"Compiled for {', '.join(targets)}: {'; '.join(everywhere)}.", ""]
    lines += [f"| other programs | {' | '.join(targets)} |", "|---" * (1 + len(targets)) + "|"]
    others = [name for name in programs if name not in everywhere]
    lines += [f"| {name} | {' | '.join(states[name])} |" for name in others]
    lines += ["", *(f"({number + 1}) {reason}" for number, reason in enumerate(reasons))]
    for target in DETAILED:
        lines += ["", f"{target}:", "", "| program | temporary memory | collectives, overlapped |"]
        lines += ["|---|---|---|"]
        rows_here = [found[program, target] for program in programs if (program, target) in found]
        lines += [_details(row) for row in rows_here if _is_detailed(row)]
    lines += ["", *_own_programs(own), "", *_versions(rows + own)]
    return "\n".join(lines)


def _own_programs(rows: list[Row]) -> list[str]:
    """The table of programs with this package's own calls, by JAX version."""
    versions = sorted({row["versions"]["jax"] for row in rows})
    found = {(row["program"], row["versions"]["jax"]): row for row in rows}
    named = " and ".join(versions)
    lines = [f"With this package's own calls (`cuda_peer`), for 8 H100, by JAX {named}:", ""]
    lines += ["| program | state |", "|---|---|"]
    for program in PROGRAMS_FOR_GPUS:
        cells = [_own_state(found.get((program, version))) for version in versions]
        state = "; then ".join(dict.fromkeys(cells))  # once where all versions agree
        lines.append(f"| {program.removesuffix(', cuda_peer')} | {state} |")
    return lines


def _own_state(row: Row | None) -> str:
    if row is None or row["state"] != "compiled":
        return "-" if row is None else f"refused: {row['reason']}"
    moved = row["overlap"].get(EXCHANGE)
    if moved is None:
        return "compiled"
    num = row["collectives"][EXCHANGE]
    works = [f"{moved[work] / moved['bytes']:.0%} beside {work}" for work in WORKS if work in moved]
    return f"{num} exchanges, {' and '.join(works) or 'one call each'}"


def _state(row: Row | None, reasons: list[str]) -> str:
    if row is None:
        return "-"
    if row["state"] == "compiled":
        return "compiled"
    reason = row["reason"]
    if reason not in reasons:
        reasons.append(reason)
    return f"refused ({reasons.index(reason) + 1})"


def _is_detailed(row: Row) -> bool:
    """Whether a collective of this program could overlap, or its memory matters."""
    works = {work for moved in row.get("overlap", {}).values() for work in moved}
    return bool(works - {"bytes"}) or row["program"] in DETAILED_PROGRAMS


def _details(row: Row) -> str:
    moves = []
    for kind, count in row["collectives"].items():
        moved = row["overlap"][kind]
        beside = max(moved.get("attention", 0), moved.get("product", 0))
        share = f", {beside / moved['bytes']:.0%}" if beside and moved["bytes"] > 2**16 else ""
        if moved["bytes"] > 2**16:
            moves.append(f"{count} {kind}{share}")
    return f"| {row['program']} | {row['temporary_MB']} MB | {'; '.join(moves) or '-'} |"


def _versions(rows: list[Row]) -> list[str]:
    alike: dict[str, list[Row]] = {}
    for row in rows:
        named = row["versions"].items()
        text = ", ".join(f"{name} {version}" for name, version in named if name != "date")
        alike.setdefault(text, []).append(row)
    lines = []
    for text, same in alike.items():
        where = ", ".join(name for name in TARGETS if name in {row["target"] for row in same})
        dates = sorted({row["versions"]["date"] for row in same})
        lines.append(f"{where}: {text}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.")
    return lines


def page() -> str:
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    rows = json.loads(RESULTS.read_text())["rows"]
    return f"{before}{BEGIN}\n{tables(rows)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
