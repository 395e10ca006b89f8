"""Stress test of several processes; prints the outcome of each kind of run.

    python tests/stress/stress_processes.py                         all of it, about an hour
    python tests/stress/stress_processes.py --trials 9 kill loops   some of it, shorter

Runs the suite of every operation with 2, 4 and 8 processes, trials of every failure, jobs that lose
processes one by one, and dispatches back to back with delays. Exits with 1 if a run failed or left
shared-memory segments behind.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time

PROGRAMS = pathlib.Path(__file__).parents[1] / "processes"
FAILURES = ("late", "shapes", "operation", "metadata", "constants", "batch", "stop")
FAILURES += ("gemm late", "gemm shapes", "gemm stop", "ring shapes")
KILLS = ("kill", "gemm kill")


def launch(program, *arguments, processes, devices=1):
    options = [f"--processes={processes}", f"--devices={devices}"]
    return subprocess.run(
        [
            *(sys.executable, "-m", "jax_cp_dispatch.launch", *options),
            *(str(PROGRAMS / program), *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_suite(_):
    """Every operation."""
    for processes, devices in ((2, 1), (4, 1), (8, 1), (2, 4), (4, 2)):
        done = launch("suite.py", processes=processes, devices=devices)
        num_right = len(re.findall(r"^\[\d+\] all \d+ ok$", done.stdout, re.M))
        yield num_right, processes, f"processes with {devices} devices passed", done


def run_failures(options):
    """One process fails repeatedly and survives."""
    for kind in FAILURES:
        done = launch("failures.py", f"--trials={options.trials}", kind, processes=3)
        found = re.findall(rf"{kind}: (\d+) of", done.stdout)
        yield min(map(int, found), default=0), options.trials, f"trials of {kind}", done


def run_kill(options):
    """Each job loses two of four processes; the next job starts at once."""
    for kind in KILLS:
        num_right = num_killed = 0
        done = None
        while num_killed < options.trials:
            done = launch("failures.py", "--trials=2", kind, processes=4)
            num_killed += 2
            found = [int(n) for n in re.findall(rf"{kind}: (\d+) of 2", done.stdout)]
            num_right += min(found) if len(found) == 2 else 0
            if num_right < num_killed:
                break
        yield num_right, num_killed, f"trials of {kind}", done


def run_loops(options):
    """Calls back to back, each rank delayed by its own times."""
    number = str(options.dispatches)
    for processes, devices in ((2, 1), (4, 1), (2, 4)):
        for what, arguments in (("dispatches", []), ("GEMMs", ["gemms"])):
            done = launch("loops.py", number, *arguments, processes=processes, devices=devices)
            num_right = done.stdout.count(f"{number} {what}, 0 mismatches")
            text = f"processes with {devices} devices made {number} {what} without a mismatch"
            yield num_right, processes, text, done


def in_shared_memory():
    return set(os.listdir("/dev/shm"))


def main():
    parts = {"suite": run_suite, "failures": run_failures, "kill": run_kill, "loops": run_loops}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="of each kind of failure")
    parser.add_argument("--dispatches", type=int, default=10_000)
    parser.add_argument("parts", nargs="*", default=list(parts), help=", ".join(parts))
    options = parser.parse_args()
    is_right, before = True, in_shared_memory()
    for name in options.parts:
        begin = time.monotonic()
        for num_right, number, text, done in parts[name](options):
            seconds = time.monotonic() - begin
            print(f"{num_right} of {number} {text} ({seconds:.0f} s)", flush=True)
            begin = time.monotonic()
            if num_right != number:
                is_right = False
                print(done.stdout[-4000:])
    left = in_shared_memory() - before
    print(f"{len(left)} segments left behind", *left)
    sys.exit(0 if is_right and not left else 1)


if __name__ == "__main__":
    main()
