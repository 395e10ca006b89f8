"""`python -m jax_cp_dispatch doctor`: what this machine offers, as a table or JSON."""

import argparse
import itertools
import json
import os
import textwrap

from jax_cp_dispatch._command import MOST_DEVICES, check_number, end_command
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.doctor.in_processes import try_processes
from jax_cp_dispatch.doctor.machine import Finding, has_gpu, look_at_machine
from jax_cp_dispatch.doctor.self_test import try_implementations

_OF_PROCESSES = "transport shared_memory"
_MARKS = {"ok": "ok", "missing": "--", "wrong": "XX"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument(
        "--devices",
        type=int,
        default=4,
        help="virtual CPU devices to test if JAX uses the CPU (default 4)",
    )


def main(options: argparse.Namespace) -> int:
    """Returns 1 if anything is wrong, 2 for an unusable argument; missing parts do not count."""
    return end_command("doctor", _run, options)


def _run(options: argparse.Namespace) -> int:
    check_number("--devices", options.devices, minimum=1, maximum=MOST_DEVICES)
    if os.environ.get("JAX_PLATFORMS", "" if has_gpu() else "cpu") == "cpu":
        start_cpu_devices(options.devices)
    findings = []
    tried = (finding for finding in try_implementations() if finding.name != _OF_PROCESSES)
    in_processes = (try_processes() for _ in [0])  # lazily
    for finding in itertools.chain(look_at_machine(), tried, in_processes):
        findings.append(finding)
        if not options.json:
            print(_row(finding), flush=True)
    is_well = all(finding.verdict != "wrong" for finding in findings)
    if options.json:
        print(json.dumps({"ok": is_well, "findings": [f._asdict() for f in findings]}, indent=2))
    else:
        print("\nok: works.  --: missing, but optional.  XX: broken.")
        print("Everything works." if is_well else "Something is wrong: see XX.")
    return 0 if is_well else 1


def _row(finding: Finding) -> str:
    lines = [f"{_MARKS[finding.verdict]}  {finding.name:<26} {finding.found}"]
    margin = " " * 31
    lines += textwrap.wrap(
        finding.remedy,
        92,
        break_on_hyphens=False,
        initial_indent=margin,
        subsequent_indent=margin,
    )
    return "\n".join(lines)
