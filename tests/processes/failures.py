"""Ranks fail in every way, repeatedly; checks the errors of all others. Run by the launcher.

    python -m jax_cp_dispatch.launch --processes 4 tests/processes/failures.py --trials 9 late stop

In each trial one process, the victim, fails while all others call a dispatch; an overlapped GEMM
if the kind starts with "gemm"; ring attention, which begins with a gather of segment ids, if it
starts with "ring". Then all live processes make an exchange with a correct result.
Prints the number of successful trials of each kind. A killed process is not replaced, so these
trials end when one process is left.
"""

import argparse
import contextlib
import os
import pathlib
import random
import re
import signal
import sys
import threading
import time
from typing import Any

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh
from movement_oracle import dispatched
from places import AXIS, RANKS, T, check, draw, on_ranks, place, place_all, plan_of

import jax_cp_dispatch as cp

DEADLINE = 2.0
WAITED = f"|(waited {DEADLINE * 1000:.0f} ms for rank"

# The expected message after the operation, by kind, with the victim's rank and process.
EXPECTED = {
    "late": r"missing ranks \[{rank}\].*\[{rank}\] of process {process} \(pid {pid}, alive\)",
    "shapes": r"Expected rank {rank} in: dispatch of 16 tokens, capacity (\d+) .*"
    r"Seen: it came to another call: dispatch of 16 tokens, capacity (?!\1 )\d+ ",
    "operation": r"Expected rank {rank} in: dispatch .* ranks, call \d+ of its program: .*"
    r"Seen: it came to another call: combine ",
    "metadata": r"rank {rank} expects \d+ tokens from rank 0 \(num_recv_tokens\) but rank 0's",
    "constants": r"Expected rank {rank} in: dispatch .*Seen: it came to an equal call of another "
    r"program, .* a plan of another batch",
    "batch": r"rank {rank} of process {process} follows the plan with checksum \S+ but "
    r"rank 0 of process 0 follows another one",
    "stop": r"(\[{rank}\] of process {process} \(pid {pid}, stopped\))|"
    r"(process {process} \(pid {pid}, stopped\) the rows of ranks \[{rank}\])",
}
ENDED = r"expected ranks \[{rank}\] of process {process} \(pid {pid}\), seen: it has ended"
RING = r"matmul_reduce_scatter \(RS, RING_EXCHANGE\) of rows \[.*\], "
ANOTHER = "Seen: it came to another call: "
EXPECTED |= {
    "gemm late": EXPECTED["late"],
    "gemm shapes": rf"Expected rank {{rank}} in: {RING}.*8,5\].*{ANOTHER}{RING}.*8,6\]",
    "gemm stop": EXPECTED["stop"]
    + WAITED
    + r" {rank} of process {process} \(pid {pid}, stopped\), signal)"
    r"|(process {process} \(pid {pid}, stopped\) the parts of ranks \[{rank}\] are not done)",
    "ring shapes": r"context_parallel_attention over .*Expected rank {rank} in: .*\[1,1,16\].*"
    rf"{ANOTHER}.*\[1,1,8\]",
    "kill": ENDED,
    "gemm kill": ENDED + WAITED + r" {rank} of process {process} \(pid {pid}, ended\), signal)",
}


def tell(name, value=""):
    """Tells the other processes."""
    client: Any = distributed.global_state.client
    client.key_value_set(f"{name} of {jax.process_index()}", value)


def heard(name, process):
    client: Any = distributed.global_state.client
    return client.blocking_key_value_get(f"{name} of {process}", 600_000)


def call(program, operands):
    jax.block_until_ready(program(*operands))


class Job:
    """The programs of one mesh, with one device of each live process."""

    def __init__(self, processes):
        self.processes = processes
        devices = [next(d for d in jax.devices() if d.process_index == p) for p in processes]
        self.mesh, self.num_ranks = Mesh(np.array(devices), (AXIS,)), len(processes)
        self.plan, self.capacity = plan_of(1, self.num_ranks)
        self.x = draw(0, self.num_ranks, 3)
        self.here, self.metadata = place_all((self.x, cp.Metadata(**self.plan)), self.mesh)
        one_more = self.plan["num_recv_tokens"].copy()
        one_more[-1, 0] += 1
        self.bad_plan: dict[str, Any] = {**self.plan, "num_recv_tokens": one_more}
        self.bad_metadata = place_all(cp.Metadata(**self.bad_plan), self.mesh)
        self.matrices = [place(draw(seed, self.num_ranks, 8), self.mesh) for seed in range(2)]
        self.ids = place(np.ones((self.num_ranks, T), np.int32), self.mesh)
        # All call it equally often; otherwise a program's ranks never meet again.
        self.proof = self.compiled(self.dispatch(self.capacity + 3, deadline=60.0))
        self.prepared = {}  # what `call_of` calls, by what kinds begin with
        self.num_calls = 0  # of `call_of`
        self.num_trials = 0

    def compiled(self, program, *operands):
        """Compiles before all meet: a deadline is shorter than processes may differ in that."""
        return program.lower(*(operands or (self.here, self.metadata))).compile()

    def prepare(self, kind):
        """Compiles the program of a kind, and returns it with its operands."""
        exchanged = self.here, self.metadata
        makers = {
            "gemm": lambda: (self.multiply(5), self.matrices),
            "ring": lambda: (self.rotate(T), (self.here, self.ids)),
            "batch": self.plan_batches,
            "constants": lambda: (self.closed_over(self.plan), (self.here,)),
            # Of its own: all call it equally often.
            "metadata": lambda: (self.dispatch(self.capacity + 2), (self.here, self.bad_metadata)),
            "": lambda: (self.dispatch(self.capacity), exchanged),
        }
        name = next(name for name in makers if kind.startswith(name))
        if name not in self.prepared:
            program, operands = makers[name]()
            self.prepared[name] = self.compiled(program, *operands), operands
        return self.prepared[name]

    def plan_batches(self):
        """Plans the documents of two steps: a rank that skips one passes the plan of the other."""
        tokens = self.num_ranks * T
        capacities = (4 * T, tokens, 16, 16, 16)
        config = cp.PlanConfig(4, *capacities)
        self.documents = []
        for at in (T, T + 5):
            ids = np.repeat([[1, 2]], [at, tokens - at], axis=1)
            plan = cp.plan_attention(ids, world_size=self.num_ranks, config=config)
            documents = cp.Documents(ids).with_plan(plan)
            specs = documents.specs(AXIS)
            self.documents.append(place_all(documents, self.mesh, specs))
        rows = {"in_specs": (RANKS, specs), "out_specs": RANKS}
        attention = jax.jit(jax.shard_map(self.attend, mesh=self.mesh, **rows))
        return attention, (self.here, self.documents[0])

    def attend(self, x, documents):
        x = x[:, :, None]
        return cp.context_parallel_attention(
            x, x, x, documents=documents, algorithm="balanced", axis_name=AXIS, deadline=60.0
        )

    def dispatch(self, capacity, deadline=DEADLINE):
        options: Any = {"axis_name": AXIS, "capacity": capacity, "deadline": deadline}
        return on_ranks(lambda x, m: cp.dispatch(x, m, **options), self.mesh)

    def closed_over(self, plan):
        """Returns a program whose constants are a plan and one of its numbers.

        XLA takes small constants alone for the identity of a program. Programs that differ in
        larger ones meet, and then their plans are compared.
        """
        move, one = self.dispatch(self.capacity), float(plan["num_recv_tokens"][-1, 0])
        return jax.jit(lambda x: move(x + one, cp.Metadata(**plan)))

    def multiply(self, num_columns):
        """Returns a program: all ranks' tokens times a weight, reduce-scattered by rows."""
        options: Any = {"axis_name": AXIS, "method": "ring", "deadline": DEADLINE}

        def local(x, w):
            x, w = jax.numpy.tile(x, (self.num_ranks, 1)), w[:8, :num_columns]
            return cp.matmul_reduce_scatter(x, w, **options)

        return on_ranks(local, self.mesh)

    def rotate(self, num_tokens):
        """Returns a program: ring attention over the documents of all ranks."""

        def local(x, ids):
            x, options = x[None, :num_tokens, None], {"axis_name": AXIS, "deadline": DEADLINE}
            options |= {"segment_ids": ids[None, :num_tokens], "algorithm": "ring"}
            return cp.context_parallel_attention(x, x, x, **options)

        return on_ranks(local, self.mesh)

    def call_of(self, kind):
        """The call of the others while the victim fails."""
        self.num_calls += 1
        call(*self.prepare(kind))

    def catch_up(self, kind):
        """Makes the calls that a process has missed: a stopped one may have made one more."""
        counts = jax.make_array_from_callback(
            (self.num_ranks,), self.here.sharding, lambda _: np.array([self.num_calls])
        )
        most = jax.jit(jax.numpy.max)(counts)
        while self.num_calls < int(most):
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
                self.call_of(kind)

    def wait_for_others(self):
        """Waits until all others have given up: only then is a call late."""
        for other in self.processes[:-1]:
            heard(self.name_of_trial(), other)

    def name_of_trial(self):
        return f"{len(self.processes)}/{self.num_trials}"

    def prove(self):
        """All live processes exchange, and start the next trial together."""
        check(
            self.proof(self.here, self.metadata), dispatched(self.plan, self.x, self.capacity + 3)
        )


def another_call(kind, job):
    """The call that the victim makes instead of the others', and its operands, or None."""
    options: Any = {"axis_name": AXIS, "deadline": DEADLINE}
    exchanged, multiplied = (job.here, job.metadata), job.matrices

    def combine_rows(x, m):
        return cp.combine(jax.numpy.resize(x, (job.capacity, 3)), m, num_tokens=T, **options)

    calls = {
        "shapes": lambda: (job.dispatch(job.capacity + 1), exchanged),
        "constants": lambda: (job.closed_over(job.bad_plan), (job.here,)),
        "operation": lambda: (on_ranks(combine_rows, job.mesh), exchanged),
        "gemm shapes": lambda: (job.multiply(6), multiplied),
        "ring shapes": lambda: (job.rotate(T // 2), (job.here, job.ids)),
    }
    if kind not in calls:
        return None
    program, operands = calls[kind]()
    return job.compiled(program, *operands), operands


def fail(kind, job, pid, another):
    """The action of the victim. Raises what its own call raises."""
    if another:
        job.num_calls += kind == "constants"  # it has not missed a call of the others' program
        call(*another)
    elif kind in ("late", "gemm late"):
        job.wait_for_others()
        job.call_of(kind)
    elif kind == "metadata":
        job.call_of(kind)
    elif kind == "batch":
        job.num_calls += 1
        call(job.prepare(kind)[0], (job.here, job.documents[1]))
    else:
        number = signal.SIGSTOP if kind.endswith("stop") else signal.SIGKILL
        threading.Timer(random.uniform(0, 0.05), os.kill, (pid, number)).start()
        while True:
            job.call_of(kind)


def trial(kind, job, pids):
    """Returns whether this process saw the expected result."""
    victim = job.processes[-1]
    here, rank = jax.process_index(), job.num_ranks - 1
    another = another_call(kind, job) if here == victim else None
    job.prepare(kind)
    job.prove()
    job.num_trials += 1
    begin = time.monotonic()
    try:
        if here == victim:
            fail(kind, job, pids[victim], another)
        else:
            while True:
                job.call_of(kind)
                if not kind.endswith(("stop", "kill")):
                    raise AssertionError("the call succeeded")
        error = "none"
    except (jax.errors.JaxRuntimeError, ValueError) as raised:
        error = str(raised)
    if here != victim:
        tell(job.name_of_trial())
    seconds = time.monotonic() - begin
    if kind.endswith("stop") and here == 0:
        os.kill(pids[victim], signal.SIGCONT)
    if kind.endswith("kill"):
        job = Job(job.processes[:-1])
    job.prove()
    if kind.endswith("stop"):
        job.catch_up(kind)
    expected = EXPECTED[kind].format(rank=rank, process=victim, pid=pids[victim])
    is_right = here == victim or re.search(expected, error, re.S)
    if not is_right:
        print(f"{kind}: after {seconds:.2f} s wrong: {error}", flush=True)
    return is_right, seconds, job


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("kinds", nargs="*", default=list(EXPECTED))
    options = parser.parse_args()
    if jax.process_count() < 3:
        parser.error(f"there are {jax.process_count()} processes; 3 are needed. See above.")
    random.seed(jax.process_index())
    job = Job(list(range(jax.process_count())))
    tell("pid", str(os.getpid()))
    pids = [int(heard("pid", process)) for process in job.processes]
    wrong = 0
    for kind in options.kinds:
        trials = options.trials
        if kind.endswith("kill"):
            trials = min(trials, len(job.processes) - 1)
        num_right, longest = 0, 0.0
        for _ in range(trials):
            is_right, seconds, job = trial(kind, job, pids)
            num_right, longest = num_right + bool(is_right), max(longest, seconds)
        print(f"{kind}: {num_right} of {trials}, at most {longest:.1f} s", flush=True)
        wrong += trials - num_right
    sys.stdout.flush()
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    cp.initialize()
    main()
