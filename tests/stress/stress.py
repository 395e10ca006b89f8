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
import functools
import os
import pathlib
import re
import subprocess
import sys
import threading
from typing import Any, NamedTuple

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name)
    for name in ("processes", "contract", "oracles", "support")
)

import jax
import jax.numpy as jnp
import numpy as np
from contract import DATA, on_global_arrays, specs_of, split, with_gradients
from jax.sharding import Mesh, PartitionSpec as P
from operations import CAPACITY, CASES
from places import AXIS, place_all
from suite import check_close

import jax_cp_dispatch as cp
from jax_cp_dispatch.cpu_devices import start_cpu_devices

# Others take long to compile and exchange as these do, or need certain numbers of ranks.
MOVES = ("dispatch", "combine", "dispatch_qkv", "dispatch_start")
NAMES = (*MOVES, "ragged_all_to_all", "experts", "ring", "all_gather_matmul none")
NAMES += ("all_gather_matmul ring", "matmul_reduce_scatter ring", "matmul_reduce_scatter pipeline")
BY_NAME = {case.name: case for case in CASES if case.name in NAMES}
SETS = 3  # of arrays for a call: a channel has the rows of two calls
SEEDS = 8
SHORT_DEADLINE = 2.0
GROUPS_AND_RANKS = P(DATA, AXIS)


class Structure(NamedTuple):
    """What is compiled. A call is a case, and one of `WAYS`."""

    groups: int  # the mesh is groups x ranks
    devices: tuple[int, ...]
    dtype: str
    is_global: bool  # plain jit on arrays of all ranks
    calls: tuple[tuple[str, str], ...]


class Inputs(NamedTuple):
    """The inputs of one run, beside those of the cases: arrays [groups, ranks]."""

    delays: Any  # rounds of arithmetic before each call
    is_here: Any  # the ranks that take part in "maybe"
    flags: Any  # the way of "branch"; the same on all ranks


def at(sets, i):
    return jax.tree.map(lambda x: x[i], sets)


def stack(trees, numpy: Any = np):
    return jax.tree.map(lambda *x: numpy.stack(x), *trees)


def one(results):
    return stack([results], jnp)


def branch(run, sets, inputs):
    return one(
        jax.lax.cond(inputs.flags[0, 0] > 0, run, lambda *_: run(*at(sets, 1)), *at(sets, 0))
    )


def maybe(run, sets, inputs):
    away = lambda *x: jax.tree.map(jnp.zeros_like, jax.eval_shape(run, *x))
    return one(jax.lax.cond(inputs.is_here[0, 0], run, away, *at(sets, 0)))


# From a call, its sets of arrays, and the inputs, to the results of some sets.
WAYS = {
    "many": lambda run, sets, _: stack([run(*at(sets, i)) for i in range(SETS)], jnp),
    "loop": lambda run, sets, _: jax.lax.scan(lambda _, x: (None, run(*x)), None, sets)[1],
    "gradients": lambda run, sets, _: one(run(*at(sets, 0))),
    "branch": branch,
    "maybe": maybe,
}


def chosen_sets(way, flag):
    return {"gradients": [0], "maybe": [0], "branch": [1 - flag]}.get(way, [*range(SETS)])


@functools.cache
def drawn(name, dtype, num_ranks, seed):
    """Returns (floats, others, cotangents) of a case, and (results, gradients)."""
    arrays = BY_NAME[name].arrays(dtype, ranks=num_ranks, seed=seed)
    results, gradients, cotangents = BY_NAME[name].expected(arrays)
    return (*split(arrays), cotangents), (results, gradients)


class Program:
    """One compiled structure."""

    def __init__(self, structure: Structure):
        devices = np.array(jax.devices())[list(structure.devices)]
        self.structure, self.num_ranks = structure, devices.size // structure.groups
        self.mesh = Mesh(devices.reshape(structure.groups, -1), (DATA, AXIS))
        operands, _ = self.draw(np.zeros((len(structure.calls), structure.groups, SETS), int))
        self.specs, outs = [], []
        for (name, way), (floats, others, cotangents) in zip(
            structure.calls, operands, strict=True
        ):
            of = functools.partial(specs_of, axes=(AXIS,), lead=(DATA, None))
            case = BY_NAME[name]
            specs = of(case.specs, floats), of(case.specs, others), of(case.results, cotangents)
            self.specs.append(specs)
            outs.append((specs[2], specs[0] if way == "gradients" else {}))
        run = self.everywhere
        if not structure.is_global:
            run = jax.shard_map(
                run, mesh=self.mesh, in_specs=(self.specs, GROUPS_AND_RANKS), out_specs=outs,
                check_vma=False,
            )  # fmt: skip
        self.run = jax.jit(run)

    def call_of(self, name, way):
        """Returns a function of floats, others and cotangents."""
        options = {"deadline": SHORT_DEADLINE} if way == "maybe" else {}
        call = functools.partial(BY_NAME[name].call, axis_name=AXIS, **options)
        if self.structure.is_global:
            call = on_global_arrays(BY_NAME[name], self.mesh)
        if way == "gradients":
            return with_gradients(call)
        return lambda floats, others, _: (call({**floats, **others}), {})

    def everywhere(self, operands, inputs):
        """What each rank computes; or, on arrays of all ranks, the program."""
        zero, found, before = jnp.zeros(()), [], ""
        for (name, way), sets in zip(self.structure.calls, operands, strict=True):
            if not self.structure.is_global and before != "maybe":  # XLA's collective has no error
                zero = self.delayed(zero, inputs.delays)
            before = way
            floats, others, cotangents = at(sets, 0)  # of the group
            floats = {name: x + zero.astype(x.dtype) for name, x in floats.items()}
            results = WAYS[way](self.call_of(name, way), (floats, others, cotangents), inputs)
            zero = sum((0 * x).sum().astype(jnp.float32) for x in jax.tree.leaves(results))
            found.append(jax.tree.map(lambda x: x[None], results))
        return found

    def delayed(self, zero, delays):
        """Returns zero after the delay of the rank, and a collective of XLA."""
        busy = jnp.broadcast_to(zero, (64, 64))
        busy = jax.lax.fori_loop(0, delays[0, 0], lambda _, a: jnp.sin(a) + 0.5, busy)
        return jax.lax.psum((busy[0, 0] > 1e6).astype(jnp.float32), AXIS)

    def draw(self, seeds):
        """Returns the operands, and the results, of each call: [groups, sets, ...]."""
        dtype, calls = self.structure.dtype, self.structure.calls
        drawn_of = lambda name, seeds: stack(
            [stack([drawn(name, dtype, self.num_ranks, seed) for seed in group]) for group in seeds]
        )
        both = [drawn_of(name, of) for (name, _), of in zip(calls, seeds.tolist(), strict=True)]
        return [x for x, _ in both], [x for _, x in both]

    def start(self, operands, inputs):
        """Launches the program; the results may not be ready yet."""
        operands = [
            tuple(place_all(x, self.mesh, spec) for x, spec in zip(of, specs, strict=True))
            for of, specs in zip(operands, self.specs, strict=True)
        ]
        return self.run(operands, place_all(inputs, self.mesh, GROUPS_AND_RANKS))

    def check(self, found, expected, flag):
        for call, got, (results, gradients) in zip(
            self.structure.calls, found, expected, strict=True
        ):
            sets, want = chosen_sets(call[1], flag), (results, {})
            if call[1] == "gradients":
                want = results, gradients
            want = jax.tree.map(lambda x, sets=sets: x[:, sets], want)
            check_close(got, want, self.structure.dtype, call)


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
        calls, shape = program.structure.calls, (program.structure.groups, program.num_ranks)
        operands, expected = program.draw(rng.integers(SEEDS, size=(len(calls), shape[0], SETS)))
        flag, error = int(rng.integers(2)), None
        delays = rng.integers(0, 300, shape) * (rng.random(shape) < 0.3)
        inputs = Inputs(delays.astype("i4"), np.ones(shape, bool), np.full(shape, flag, "i4"))
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
        num_right = len(re.findall(r"^\[\d+\] all \d+ ok$", done.stdout, re.M))
        yield num_right, processes, f"processes with {devices} devices passed", done


def run_failures(options):
    """One process fails repeatedly and survives."""
    for kind in KINDS:
        done = launch(PROCESSES / "failures.py", f"--trials={options.trials}", kind, processes=3)
        found = re.findall(rf"{kind}: (\d+) of", done.stdout)
        yield min(map(int, found), default=0), options.trials, f"trials of {kind}", done


def run_kill(options):
    """Each job loses two of four processes; the next job starts at once."""
    for kind in ("kill", "gemm kill"):
        for _ in range(0, options.trials, 2):
            done = launch(PROCESSES / "failures.py", "--trials=2", kind, processes=4)
            found = [int(n) for n in re.findall(rf"{kind}: (\d+) of 2", done.stdout)]
            yield min(found) if len(found) == 2 else 0, 2, f"trials of {kind}", done


def run_random(options):
    """The random programs, in the same order in all processes."""
    for processes, devices in ((2, 2), (4, 1), (2, 4)):
        job = __file__, f"--programs={options.programs}", f"--seed={options.seed}"
        done = launch(*job, processes=processes, devices=devices)
        num_right = len(re.findall(rf"\] {options.programs} programs, .* 0 wrong", done.stdout))
        yield num_right, processes, f"processes with {devices} devices: random programs", done


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
