"""Compiles programs for accelerators on a machine without them, by the accelerators' own compilers.

    python accelerators/compile.py --targets "TPU v5e" --programs "^ring$|^placed$" --output FILE

Prints a line for each program and target: compiled, or the compiler's reason; the memory that it
needs beside arguments and results; its collectives; and which of them overlap with what. Fails if
a program does not compile.
"""

import argparse
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device is opened
os.environ["JAX_PLATFORMS"] = "cpu"

from programs import PROGRAMS, PROGRAMS_FOR_GPUS, PROGRAMS_FOR_TPUS
from schedule import Program as Scheduled
from shapes import Shapes
from targets import TARGETS, Target, versions

from jax_cp_dispatch._ranks import runtime

_VMEM = re.compile(r'custom_call_target="tpu_custom_call".*"used_scoped_memory_.*?"size":"(\d+)"')


def compiled(target: Target, shapes: Shapes, name: str, program: Any) -> dict[str, Any]:
    """Compiles one program; returns a row of the table."""
    row: dict[str, Any] = {"target": target.name, "program": name}
    began = time.monotonic()
    try:
        executable = target.lower(program(shapes).trace()).compile()
    except Exception as error:  # the reason is the result
        reason = " ".join(str(error).split("Suspected Python Code Location")[0].split())
        return row | {"state": "refused", "reason": f"{type(error).__name__}: {reason[:400]}"}
    text = executable.as_text()
    schedule = Scheduled(text)
    memory = executable.memory_analysis()
    return row | {
        "state": "compiled",
        "seconds": round(time.monotonic() - began, 1),
        "temporary_MB": memory.temp_size_in_bytes >> 20 if memory else None,
        "moved_MB": round(schedule.moved_bytes() / 1e6),
        "collectives": schedule.collectives(),
        "overlap": schedule.overlap(),
        "loops": schedule.count("while"),
        "conditionals": schedule.count("conditional"),
        "cudnn": text.count("__cudnn$"),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "vmem_MB": max((int(size) >> 20 for size in _VMEM.findall(text)), default=None),
        "custom_calls": sorted(set(re.findall(r'custom_call_target="(jax_cp_[^"]+)"', text))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--targets", default="", help="regular expression of names of targets")
    parser.add_argument("--programs", default="", help="likewise of programs")
    parser.add_argument("--maxtext", action="store_true", help="MaxText's step, and nothing else")
    parser.add_argument("--own", action="store_true", help="programs with own calls only")
    parser.add_argument("--platform", default="", help="of the compiler that is installed here")
    parser.add_argument("--output", type=pathlib.Path, help="write the rows here as JSON")
    options = parser.parse_args()
    programs: dict[str, Callable[[Shapes], Any]] = dict(PROGRAMS)
    if options.maxtext:  # in an environment with it
        from maxtext_step import PROGRAMS as programs
    if options.own:
        programs = {}
    rows = []
    for target in TARGETS.values():
        if options.platform not in ("", target.platform):
            continue
        if not re.search(options.targets, target.name):
            continue
        try:
            shapes = Shapes(target.devices())
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            print(f"{target.name}: not tried: {type(error).__name__}: {reason}", flush=True)
            if options.platform:  # whose compiler is installed, so the caller says
                sys.exit(f"not compiled: anything for {target.name}")
            continue
        own = {}
        if target.platform == "cuda" and runtime.cuda:
            own = PROGRAMS_FOR_GPUS
        if target.platform == "tpu" and not options.maxtext:
            own = PROGRAMS_FOR_TPUS
        for name, program in (programs | own).items():
            if re.search(options.programs, name):
                rows.append(compiled(target, shapes, name, program))
                print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
                write(options.output, rows)
    refused = [f"{row['program']} ({row['target']})" for row in rows if row["state"] != "compiled"]
    if refused:
        sys.exit(f"not compiled: {', '.join(refused)}")


def write(path: pathlib.Path | None, rows: list[dict[str, Any]]) -> None:
    if path is None:
        return
    held = json.loads(path.read_text())["rows"] if path.is_file() else []
    date = time.strftime("%Y-%m-%d")
    for row in rows:
        row.setdefault("versions", versions() | {"date": date})
    new = {_key(row) for row in rows}
    held = [row for row in held if _key(row) not in new]
    path.write_text(json.dumps({"rows": held + rows}, indent=1) + "\n")


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    """Rows with the same key replace each other. Programs of GPUs have one for each JAX release."""
    release = ".".join(row["versions"]["jax"].split(".")[:2])
    return row["target"], row["program"], release if row["program"] in PROGRAMS_FOR_GPUS else ""


if __name__ == "__main__":
    main()
