"""The command's arguments, and its sections in turn."""

import argparse
import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jax_cp_dispatch._command import MOST_DEVICES, InputError, check_number, end_command
from jax_cp_dispatch._measuring import machine, versions
from jax_cp_dispatch._progress import Progress
from jax_cp_dispatch._ranks.processes import initialize
from jax_cp_dispatch._text import paragraph
from jax_cp_dispatch.bench_command import (
    attention,
    gemm,
    in_processes,
    movement,
    pictures,
    planning,
    step,
)
from jax_cp_dispatch.bench_command.compare import (
    Earlier,
    committed,
    earlier_run,
    matching,
)
from jax_cp_dispatch.bench_command.ranks import Ranks, Row
from jax_cp_dispatch.bench_command.report import as_json, conclusion, section_table
from jax_cp_dispatch.bench_command.sizes import Sizes, sizes_for
from jax_cp_dispatch.cpu_devices import start_cpu_devices

SECTIONS = ("planning", "movement", "attention", "gemm", "step", "processes")
_MOST_PROCESSES = 64  # each imports JAX
QUICK_SAYS = (
    "--quick: these sizes are too small to show the gain of context parallelism. Fixed costs of "
    "each call dominate. Run without --quick to compare speeds."
)
INTERRUPTED = "interrupted; the rows measured before are kept"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}; all if none"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, one round: 106 s of CPU time were measured; too small to show the gain "
        "of context parallelism",
    )
    parser.add_argument(
        "--devices", type=int, help="virtual CPU devices (default 8), or GPUs (default all)"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="of the section processes (default 2)"
    )
    parser.add_argument(
        "--compare",
        type=pathlib.Path,
        metavar="FILE",
        help="compare with this output of --json instead of the committed results",
    )
    parser.add_argument(
        "--pictures", type=pathlib.Path, metavar="FOLDER", help="draw the ratios into this folder"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def main(options: argparse.Namespace) -> int:
    """Returns the exit status: 0, 1 if a section failed, 2 if an argument is not usable, 130 after
    Ctrl-C."""
    return end_command("bench", _run, options)


def _run(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    _check(options)
    old = committed() if options.compare is None else earlier_run(options.compare)
    _start_devices(options.devices)
    count = options.devices or jax.device_count()
    if count > jax.device_count():
        raise InputError(f"--devices is {count} but JAX has {jax.device_count()} devices.")
    sizes = sizes_for(
        jax.default_backend(),
        quick=options.quick,
        num_ranks=count,
        num_processes=options.processes,
    )
    ranks = Ranks.of_devices(count, sizes.repeats)
    names = options.sections or [x for x in SECTIONS if x != "processes" or _has_processes()]
    rows, errors = _measure(names, ranks, sizes, options, old)
    code = 130 if INTERRUPTED in errors.values() else 1 if errors else 0
    if jax.process_index() > 0:
        return code
    found = matching(rows, old)
    about: dict[str, Any] = {
        "devices": f"{ranks.name} ({jax.devices()[0].device_kind})",
        "machine": machine(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "took_s": round(time.perf_counter() - begin, 1),
    }
    if options.json:
        print(json.dumps(as_json(rows, found, errors, about), indent=1, ensure_ascii=False))
    else:
        print(conclusion(rows, found))
        print(f"{about['devices']}, {about['machine']['cpu']}: {about['took_s']} s in all")
        if options.quick:
            print(paragraph(QUICK_SAYS, indent=0))
    if options.pictures is not None:
        for path in pictures.draw(rows, options.pictures):
            print(path, file=sys.stderr)
    return code


def _measure(
    names: Sequence[str],
    ranks: Ranks,
    sizes: Sizes,
    options: argparse.Namespace,
    old: Sequence[Earlier],
) -> tuple[list[Row], dict[str, str]]:
    """Returns all rows, and the errors of sections; Ctrl-C ends the measurement and keeps rows."""
    sections = _sections(ranks, sizes, options.processes)
    progress = Progress(len(names))
    rows: list[Row] = []
    errors: dict[str, str] = {}
    for name in names:
        measured: list[Row] = []
        with progress.step(f"measuring {name}"):
            try:
                for row in sections[name]():
                    measured.append(row)
            except KeyboardInterrupt:
                errors[name] = INTERRUPTED
            except Exception as error:  # the other sections still run
                errors[name] = f"{type(error).__name__}: {error}"
        if jax.process_index() == 0 and not options.json:
            text = section_table(measured, matching(measured, old))
            print(*filter(None, [text, errors.get(name)]), "", sep="\n", flush=True)
        rows += measured
        if errors.get(name) == INTERRUPTED:
            break
    return rows, errors


def _sections(ranks: Ranks, sizes: Sizes, processes: int) -> dict[str, Callable[[], Iterator[Row]]]:
    def moved() -> Iterator[Row]:
        dtype = jax.numpy.dtype(sizes.moved_dtype)
        yield from movement.large(ranks, sizes.moved_tokens, sizes.feature, dtype, movement.SECTION)
        yield from movement.small(ranks, movement.SECTION)

    return {
        "planning": lambda: planning.measure(
            sizes.planning_ranks, sizes.planning_tokens, sizes.repeats
        ),
        "movement": moved,
        "attention": lambda: attention.measure(
            ranks, sizes.attention_tokens, sizes.heads, sizes.head_size, sizes.dtype
        ),
        "gemm": lambda: gemm.measure(ranks, sizes.gemms, sizes.dtype),
        "step": lambda: step.measure(ranks, sizes.step_tokens, sizes.model),
        "processes": lambda: in_processes.measure(
            processes, sizes.process_bytes, sizes.process_gemms, sizes.repeats
        ),
    }


def _check(options: argparse.Namespace) -> None:
    unknown = sorted(set(options.sections) - set(SECTIONS))
    if unknown:
        raise InputError(f"no section is called {unknown[0]}. Pass some of {', '.join(SECTIONS)}.")
    check_number("--devices", options.devices, minimum=1, maximum=MOST_DEVICES)
    check_number("--processes", options.processes, minimum=2, maximum=_MOST_PROCESSES)
    if options.pictures is not None:
        try:
            pictures.check_folder(options.pictures)
        except ImportError as error:
            raise InputError(str(error)) from None
        except OSError as error:
            raise InputError(
                f"cannot create the folder {options.pictures}: {error.strerror}. Pass another "
                "--pictures."
            ) from None


def _has_processes() -> bool:
    """Whether to start processes: on CPU, unless this is one process of a job."""
    return jax.default_backend() == "cpu" and jax.process_count() == 1


def _start_devices(num_devices: int | None) -> None:
    """Uses GPUs, or starts virtual CPU devices. Joins the job if this process belongs to one."""
    has_gpu = pathlib.Path("/dev/nvidiactl").exists()
    on_cpu = os.environ.get("JAX_PLATFORMS", "" if has_gpu else "cpu") == "cpu"
    if "JAX_NUM_PROCESSES" in os.environ:
        initialize()
    elif on_cpu:
        start_cpu_devices(num_devices or 8)
