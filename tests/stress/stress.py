"""Random programs of the contract's cases, with delays and failures on purpose; checks all results.

    python tests/stress/stress.py --programs 2000 --seed 0     # in several threads of one process
    python tests/stress/stress.py processes                    # between processes, about an hour
    python tests/stress/stress.py processes kill --trials 9    # some of it, shorter

Compiles a fixed number of structures; each run has new data and plans, and delays of each rank. In
one process some programs fail on purpose, next to valid ones. Between processes there are also the
suite of every operation, trials of every failure, and jobs that lose processes one by one. Exits
with 1 on a wrong result, a wrong or missing error, a hang, or shared memory that was left behind.
"""

import argparse
import collections
import concurrent.futures
import faulthandler
import os
import pathlib
import re
import subprocess
import sys
import threading

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name)
    for name in ("processes", "contract", "oracles", "support")
)

import jax
import numpy as np
from operations import CAPACITY
from program_sets import BY_NAME, MOVES, NAMES, SETS, SHORT_DEADLINE, WAYS, Program, Structure

import jax_cp_dispatch as cp
from jax_cp_dispatch.cpu_devices import start_cpu_devices

SEEDS = 8


def random_structure(rng, index) -> Structure:
    num_devices, is_global = jax.device_count(), index % 5 == 4
    names = [name for name in NAMES if not (is_global and BY_NAME[name].only_on_ranks)]
    ways = [way for way in WAYS if way != "maybe"]
    calls = [(str(rng.choice(names)), str(rng.choice(ways))) for _ in range(rng.integers(1, 4))]
    calls.insert(int(rng.integers(len(calls) + 1)), ("dispatch", ways[index % 2]))
    if index % 5 == 1:  # then a call at which a rank that was missing gets the error
        calls += [(MOVES[index % 4], "maybe"), (MOVES[index % 3], "many")]
    groups = [x for x in (1, 2, 4) if num_devices % (2 * x) == 0]
    devices = rng.permutation(num_devices) if index % 2 else range(num_devices)
    return Structure(
        1 if is_global else int(rng.choice(groups)), tuple(map(int, devices)),
        str(rng.choice(["float32", "bfloat16"])), is_global, tuple(calls),
    )  # fmt: skip


def spoil(rng, program, operands, inputs) -> str:
    """Changes inputs so that they must fail; returns the expected error."""
    groups, num_ranks = program.structure.groups, program.num_ranks
    group, rank, other = (int(rng.integers(n)) for n in (groups, num_ranks, num_ranks))
    if any(way == "maybe" for _, way in program.structure.calls) and rng.random() < 0.7:
        inputs.is_here[group, rank] = False
        passed = f"deadline of {1000 * SHORT_DEADLINE:.0f} ms passed: {num_ranks - 1}/{num_ranks}"
        return rf"{passed} ranks .*missing ranks \[{rank}\]"
    call = next(i for i, (name, _) in enumerate(program.structure.calls) if name == "dispatch")
    counts = operands[call][1]["metadata"].num_recv_tokens[group, :, rank]
    if rng.random() < 0.5:
        counts[:, num_ranks] = CAPACITY + 1
        return f"rank {rank} would receive {CAPACITY + 1} tokens but capacity"
    counts[:, other] += 1
    return rf"rank {rank} expects \d+ tokens from rank {other} "


def attempt(run):
    try:
        return run()
    except (jax.errors.JaxRuntimeError, ValueError, AssertionError) as error:
        return error


class Stress:
    """Programs, and how many runs there were, failed on purpose, and were wrong."""

    def __init__(self, options):
        self.options = options
        self.lock, self.counts = threading.Lock(), collections.Counter()
        rng = np.random.default_rng(options.seed)
        structures = [random_structure(rng, index) for index in range(options.structures)]
        self.programs = [Program(structure) for structure in structures]

    def run(self, numbers):
        """Runs some programs, all of them in flight."""
        for finish in [self.start(number) for number in numbers]:
            finish()

    def start(self, number):
        """Starts a program; returns a function that waits for it and checks it."""
        rng = np.random.default_rng((self.options.seed, number))
        program = self.programs[int(rng.integers(len(self.programs)))]
        calls, groups = program.structure.calls, program.structure.groups
        operands, expected = program.draw(rng.integers(SEEDS, size=(len(calls), groups, SETS)))
        flag, error = int(rng.integers(2)), None
        inputs = program.inputs(flag)
        inputs.delays[:] = rng.integers(0, 300, inputs.delays.shape)
        inputs.delays[rng.random(inputs.delays.shape) > 0.3] = 0
        if rng.random() < self.options.failures:
            error = spoil(rng, program, operands, inputs)
        found = attempt(lambda: program.start(operands, inputs))

        def finish():
            outcome = found
            if isinstance(found, list):
                outcome = attempt(lambda: program.check(found, expected, flag))
            self.count(number, program.structure, error, outcome)

        return finish

    def count(self, number, structure, error, outcome):
        is_right = re.search(error, str(outcome)) is not None if error else outcome is None
        faulthandler.dump_traceback_later(self.options.hang, exit=True)
        with self.lock:
            self.counts.update(
                programs=1, provoked=bool(error), seen=bool(error) and is_right, wrong=not is_right
            )
            if not is_right and self.counts["wrong"] <= 20:
                print(f"program {number}: expected {error}, got {outcome} of {structure}")


def run_programs(options) -> int:
    if cp.initialize().implementation == "in_process":
        start_cpu_devices(8)
    else:  # programs of all processes come in one order; a missing call would not be made up for
        options.threads, options.failures = 1, 0.0
    stress = Stress(options)
    faulthandler.dump_traceback_later(options.hang, exit=True)
    numbers = range(options.programs)
    with concurrent.futures.ThreadPoolExecutor(options.threads) as threads:
        list(threads.map(stress.run, (numbers[i : i + 2] for i in numbers[::2])))
    counts = stress.counts
    print(
        f"{counts['programs']} programs, {counts['provoked']} failures provoked, "
        f"{counts['seen']} seen, {counts['wrong']} wrong, seed {options.seed}",
        flush=True,
    )
    return 1 if counts["wrong"] else 0


# ---- Between processes.

PROCESSES = pathlib.Path(__file__).parents[1] / "processes"
KINDS = ("late", "shapes", "operation", "metadata", "constants", "batch", "stop")
KINDS += ("gemm late", "gemm shapes", "gemm stop", "ring shapes")


def launch(*job, processes, devices=1):
    options = [f"--processes={processes}", f"--devices={devices}"]
    return subprocess.run(
        [sys.executable, "-m", "jax_cp_dispatch.launch", *options, *map(str, job)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


def run_suite(_):
    """Every operation."""
    for processes, devices in ((2, 1), (4, 1), (8, 1), (2, 4), (4, 2)):
        done = launch(PROCESSES / "suite.py", processes=processes, devices=devices)
        found = len(re.findall(r"^\[\d+\] all \d+ ok$", done.stdout, re.M))
        yield found, processes, f"processes with {devices} devices passed", done


def run_failures(options):
    """One process fails repeatedly and survives."""
    for kind in KINDS:
        done = launch(PROCESSES / "failures.py", f"--trials={options.trials}", kind, processes=3)
        found = re.findall(rf"{kind}: (\d+) of", done.stdout)
        yield min(map(int, found), default=0), options.trials, f"trials of {kind}", done


def run_kill(options):
    """Each job loses its processes but one; the next job starts at once."""
    for kind in ("kill", "gemm kill") * (options.trials // 3):
        done = launch(PROCESSES / "failures.py", "--trials=3", kind, processes=4)
        yield done.stdout.count(f"{kind}: 3 of 3"), 1, f"jobs of {kind}", done


def run_random(options):
    """The random programs, in the same order in all processes."""
    for processes, devices in ((2, 2), (4, 1), (2, 4)):
        job = __file__, f"--programs={options.programs}", f"--seed={options.seed}"
        done = launch(*job, processes=processes, devices=devices)
        found = len(re.findall(rf"\] {options.programs} programs, .* 0 wrong", done.stdout))
        yield found, processes, f"processes with {devices} devices: random programs", done


PARTS = {"suite": run_suite, "failures": run_failures, "kill": run_kill, "programs": run_random}


def run_processes(options) -> int:
    in_shared_memory = lambda: set(os.listdir("/dev/shm"))
    is_right, before = True, in_shared_memory()
    for part in options.parts or PARTS:
        for num_right, number, text, done in PARTS[part](options):
            print(f"{num_right} of {number} {text}", flush=True)
            if num_right != number:
                is_right = False
                print(done.stdout[-4000:])
    left = in_shared_memory() - before
    print(f"{len(left)} segments left behind", *left)
    return 0 if is_right and not left else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("where", nargs="?", default="threads", choices=["threads", "processes"])
    parser.add_argument("parts", nargs="*", help=f"between processes: {', '.join(PARTS)}")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--structures", type=int, default=25, help="programs that are compiled")
    parser.add_argument("--failures", type=float, default=0.15, help="share that fails on purpose")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang", type=float, default=120, help="seconds that a program may take")
    parser.add_argument("--trials", type=int, default=100, help="of each failure of processes")
    options = parser.parse_args()
    return (run_processes if options.where == "processes" else run_programs)(options)


if __name__ == "__main__":
    sys.exit(main())
