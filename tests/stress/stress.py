"""Runs random programs around dispatch and combine in several threads; checks every result.

    python tests/stress/stress.py --programs 2000 --seed 0

Compiles a fixed number of program structures; each run has new plans, data, and delays per rank.
Some programs fail on purpose, next to valid ones. Exits with 1 on a wrong result, on a wrong or
missing error, and on a hang.
"""

import argparse
import collections
import faulthandler
import os
import pathlib
import re
import sys
import threading
import time

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import numpy as np
from stress_programs import (
    CAPACITY,
    NUM_DEVICES,
    Program,
    Structure,
    can_fail,
    expected,
    random_inputs,
    random_structure,
    spoil,
)

import jax_cp_dispatch as cp
from jax_cp_dispatch.cpu_devices import start_cpu_devices


class Stress:
    """Threads that take program numbers, and their results."""

    def __init__(self, seed: int, num_programs: int, num_structures: int, failures: float):
        self.seed, self.numbers = seed, collections.deque(range(num_programs))
        self.failures = failures
        self.lock, self.counts, self.running = threading.Lock(), collections.Counter(), {}
        self.wrong: list[str] = []
        rng = np.random.default_rng(seed)
        self.buffer = cp.buffers.create_dispatch_buffer(capacity=CAPACITY)
        structures = [random_structure(rng, index) for index in range(num_structures)]
        self.programs = [Program(structure, self.buffer) for structure in structures]

    def work(self, thread):
        while self.numbers:
            try:
                taken = [self.numbers.popleft() for _ in range(min(2, len(self.numbers)))]
            except IndexError:
                return
            self.running[thread] = (time.monotonic(), taken)
            cases = [self.start(number) for number in taken]  # all of them in flight
            for case in cases:
                self.finish(*case)
            del self.running[thread]

    def start(self, number):
        rng = np.random.default_rng((self.seed, number))
        program = self.programs[int(rng.integers(len(self.programs)))]
        inputs, error = random_inputs(rng, program.structure), None
        if rng.random() < self.failures and can_fail(program.structure):
            inputs, error = spoil(rng, program.structure, inputs)
        if rng.random() < self.failures / 10:
            self.destroy_a_buffer(number)
        return number, program, inputs, error, self.attempt(lambda: program.start(inputs))

    @staticmethod
    def attempt(run):
        try:
            return run()
        except jax.errors.JaxRuntimeError as error:
            return error

    def finish(self, number, program, inputs, error, outcome):
        if not isinstance(outcome, Exception):
            results = outcome
            outcome = self.attempt(lambda: program.finish(results))
        if error is not None or isinstance(outcome, Exception):
            return self.count_failure(number, program.structure, error, outcome)
        want, num_exchanges = expected(program.structure, inputs)
        is_right = all(map(np.array_equal, outcome, want))
        with self.lock:
            self.counts.update(programs=1, exchanges=num_exchanges)
            if not is_right:
                self.counts["mismatches"] += 1
                self.wrong.append(f"program {number}: wrong result of {program.structure}")

    def count_failure(self, number, structure, error, outcome):
        is_right = error is not None and re.search(error, str(outcome)) is not None
        with self.lock:
            self.counts.update(programs=1, provoked=error is not None, seen=is_right)
            if not is_right:
                self.wrong.append(
                    f"program {number}: expected {error!r}, got {outcome} of {structure}"
                )

    def destroy_a_buffer(self, number):
        """Runs a compiled program whose buffer is destroyed."""
        buffer = cp.buffers.create_dispatch_buffer(capacity=CAPACITY)
        devices = tuple(range(NUM_DEVICES))
        program = Program(Structure(1, devices, "int32", False, True, (("buffer", 0),)), buffer)
        inputs = random_inputs(np.random.default_rng((self.seed, number, 1)), program.structure)
        good = self.attempt(lambda: program.finish(program.start(inputs)))
        cp.buffers.destroy_dispatch_buffer(buffer)
        outcome = self.attempt(lambda: program.finish(program.start(inputs)))
        is_right = f"buffer {buffer} has been destroyed" in str(outcome)
        with self.lock:
            self.counts.update(programs=2, exchanges=2, provoked=1, seen=is_right)
            if not is_right or isinstance(good, Exception):
                self.wrong.append(f"program {number}: destroyed buffer: {good}, then {outcome}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs; see above.")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--structures", type=int, default=25, help="programs that are compiled")
    parser.add_argument("--failures", type=float, default=0.15, help="share that fails on purpose")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang", type=float, default=120, help="seconds that a program may take")
    options = parser.parse_args()
    start_cpu_devices(NUM_DEVICES)
    stress = Stress(options.seed, options.programs, options.structures, options.failures)
    threads = [
        threading.Thread(target=stress.work, args=[i], daemon=True) for i in range(options.threads)
    ]
    begin = last_line = time.monotonic()
    for thread in threads:
        thread.start()
    hangs = 0
    while any(thread.is_alive() for thread in threads) and not hangs:
        time.sleep(0.1)
        now = time.monotonic()
        late = [
            taken for since, taken in list(stress.running.values()) if now - since > options.hang
        ]
        hangs = len(late)
        if now - last_line > 10 or hangs:
            last_line = now
            print(f"{now - begin:6.0f} s  {dict(stress.counts)}  late: {late}", flush=True)
    for line in stress.wrong[:20]:
        print(line)
    counts = stress.counts
    print(
        f"{counts['programs']} programs, {counts['exchanges']} exchanges, {counts['provoked']} "
        f"failures provoked, {counts['seen']} seen, {counts['mismatches']} mismatches, "
        f"{len(stress.wrong)} wrong, {hangs} hangs, seed {options.seed}, "
        f"{time.monotonic() - begin:.0f} s",
        flush=True,
    )
    if hangs:
        faulthandler.dump_traceback()
        os._exit(1)
    return 1 if stress.wrong or counts["programs"] < options.programs else 0


if __name__ == "__main__":
    sys.exit(main())
