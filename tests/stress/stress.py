"""Runs random programs around dispatch and combine in several threads; checks every result.

    python tests/stress/stress.py --programs 2000 --seed 0

Compiles a fixed number of program structures; each run has new plans, data, and delays per rank.
Some programs fail on purpose, next to valid ones. Exits with 1 on a wrong result, on a wrong or
missing error, and on a hang.

A program is written once: the package runs it on devices, the oracle in NumPy. Values are small
integers, so every result is exact in every dtype.
"""

import argparse
import collections
import faulthandler
import functools
import os
import pathlib
import re
import sys
import threading
import time
from typing import Any, NamedTuple

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan

import jax_cp_dispatch as cp
from jax_cp_dispatch.cpu_devices import start_cpu_devices

NUM_DEVICES = 8
S, T, C, F = 4, 12, 2, 3  # slots, rows and replicas per rank, features
NUM_PLANS = 3
CAPACITY = NUM_DEVICES * T * C
SHORT_DEADLINE = 2.0
WEIGHTS = np.array([[1, -2, 0], [2, 1, -1], [-1, 0, 2]])
TAGS = np.arange(CAPACITY)[:, None] % 5


class Structure(NamedTuple):
    """The structure of a program, which is compiled. An op is a name and the number of its plan."""

    groups: int  # the mesh is groups x ranks
    devices: tuple[int, ...]
    dtype: str
    is_global: bool  # plain jit on arrays of all ranks
    check_vma: bool
    ops: tuple[tuple[str, int], ...]

    @property
    def num_ranks(self) -> int:
        return NUM_DEVICES // self.groups


class Inputs(NamedTuple):
    """The inputs of one run: arrays [groups, ranks, ...]."""

    x: Any
    plans: tuple[Any, ...]
    delays: Any  # rounds of arithmetic before each call of "delay"
    is_here: Any  # the ranks that take part in "maybe"
    flags: Any  # the branch of "cond"; the same on all ranks of a group


# ---- Programs, written once: `on` moves rows, either the package on devices or the oracle.


def wrap(h):
    """Keeps values in [-8, 8]."""
    return (h + 8) % 17 - 8


def move(on, h, seen, p, **options):
    y = on.dispatch(h, p, **options)
    return wrap(h + on.combine(y + on.tags, p, **options)), wrap(seen + y)


def many(on, h, seen, p):
    """Independent calls: several meetings are open at a time."""
    received = [on.dispatch(wrap(h + i), (p + i) % NUM_PLANS) for i in range(5)]
    home = [on.combine(y + on.tags, (p + i) % NUM_PLANS) for i, y in enumerate(received)]
    return wrap(sum(map(wrap, home))), wrap(sum(received[1:], seen + received[0]))


def qkv(on, h, seen, p):
    q, (k, v) = on.dispatch_qkv(h, (h + 1, 2 * h), p, (p + 1) % NUM_PLANS)
    hq, (hk, hv) = on.combine_qkv(q, (k + on.tags, v), p, (p + 1) % NUM_PLANS)
    return wrap(wrap(hq - hk) + hv), wrap(seen + wrap(q - k + v))


def cond(on, h, seen, p):
    ways = [functools.partial(move, on, p=(p + i) % NUM_PLANS) for i in (0, 1)]
    return on.choose(p, ways, h, seen)


OPS = {
    "move": move,
    "buffer": functools.partial(move, buffered=True),
    "many": many,
    "qkv": qkv,
    "scan": lambda on, h, seen, p: on.repeat(3, functools.partial(move, on, p=p), h, seen),
    "cond": cond,
    "pullback": lambda on, h, seen, p: (wrap(h + on.pullback(h, p)), seen),
    "matmul": lambda on, h, seen, p: (wrap(h @ on.weights), seen),
    "psum": lambda on, h, seen, p: (wrap(h + on.psum(h)), seen),
    "ppermute": lambda on, h, seen, p: (wrap(h + on.shift(h)), seen),
    "delay": lambda on, h, seen, p: (on.delay(h), seen),
    "maybe": lambda on, h, seen, p: on.maybe(functools.partial(move, on, p=p), h, seen),
}
CALLS = ("move", "buffer", "many", "qkv", "scan", "cond", "pullback")  # each at least one exchange
ON_RANKS = ("psum", "ppermute", "delay")  # only inside shard_map


class OnDevices:
    """One rank inside `shard_map`, or all of them under plain `jit`."""

    def __init__(self, structure, mesh, inputs, buffer):
        dtype, factor = structure.dtype, structure.num_ranks if structure.is_global else 1
        self.inputs, self.buffer, self.num_ranks = inputs, buffer, structure.num_ranks
        self.tags = jnp.asarray(np.tile(TAGS, (factor, 1)), dtype)
        self.weights = jnp.asarray(WEIGHTS, dtype)
        self.options: dict[str, Any] = {"axis_name": "cp"}
        if structure.is_global:
            self.options["mesh"] = mesh

    def dispatch(self, h, p, *, buffered=False, **options):
        limit: Any = {"buffer": self.buffer} if buffered else {"capacity": CAPACITY}
        return cp.dispatch(h, self.inputs.plans[p], **limit, **self.options, **options)

    def combine(self, y, p, *, buffered=False, **options):
        limit: Any = {"buffer": self.buffer} if buffered else {}
        options |= {"num_tokens": T, **limit, **self.options}
        return cp.combine(y, self.inputs.plans[p], **options)

    def dispatch_qkv(self, q, kv, p, p2):
        plans, capacities = self.inputs.plans, {"q_capacity": CAPACITY, "kv_capacity": CAPACITY}
        return cp.dispatch_qkv(q, kv, plans[p], plans[p2], **capacities, **self.options)

    def combine_qkv(self, q, kv, p, p2):
        plans, rows = self.inputs.plans, {"q_num_tokens": T, "kv_num_tokens": T}
        return cp.combine_qkv(q, kv, plans[p], plans[p2], **rows, **self.options)

    def pullback(self, h, p):
        if not jnp.issubdtype(h.dtype, jnp.floating):
            return self.combine(self.dispatch(h, p) + self.tags, p)
        y, pull = jax.vjp(lambda h: self.dispatch(h, p), h)
        return pull(y + self.tags)[0]

    def repeat(self, times, step, h, seen):
        return jax.lax.scan(lambda s, _: (step(*s), None), (h, seen), None, length=times)[0]

    def choose(self, p, ways, h, seen):
        return jax.lax.cond(self.inputs.flags.ravel()[0] > p, *ways, h, seen)

    def psum(self, h):
        return jax.lax.psum(h, "cp")

    def shift(self, h):
        pairs = [(i, (i + 1) % self.num_ranks) for i in range(self.num_ranks)]
        return jax.lax.ppermute(h, "cp", pairs)

    def delay(self, h):
        busy = jnp.broadcast_to(h[:1, :1].astype(jnp.float32), (64, 64))
        busy = jax.lax.fori_loop(0, self.inputs.delays, lambda _, a: jnp.sin(a) + 0.5, busy)
        return h + (busy[0, 0] > 1e6).astype(h.dtype)

    def maybe(self, step, h, seen):
        away = lambda h, seen: (0 * h, 0 * seen)
        step = functools.partial(step, deadline=SHORT_DEADLINE)
        return jax.lax.cond(self.inputs.is_here, step, away, h, seen)


class OnOracle:
    """All groups and ranks at once, in NumPy: arrays [groups, ranks, rows, F] of int64."""

    def __init__(self, structure, inputs):
        self.inputs, self.tags, self.weights = inputs, TAGS, WEIGHTS
        self.num_groups, self.num_exchanges = structure.groups, 0

    def dispatch(self, h, p, **_):
        self.num_exchanges += self.num_groups
        plans = self.inputs.plans[p]
        return np.stack([dispatched(plan, x, CAPACITY) for plan, x in zip(plans, h, strict=True)])

    def combine(self, y, p, **_):
        self.num_exchanges += self.num_groups
        plans = self.inputs.plans[p]
        return np.stack([combined(plan, x, T, np.int64) for plan, x in zip(plans, y, strict=True)])

    def dispatch_qkv(self, q, kv, p, p2):
        self.num_exchanges -= 2 * self.num_groups  # one for all three
        return self.dispatch(q, p), tuple(self.dispatch(x, p2) for x in kv)

    def combine_qkv(self, q, kv, p, p2):
        self.num_exchanges -= 2 * self.num_groups
        return self.combine(q, p), tuple(self.combine(x, p2) for x in kv)

    def pullback(self, h, p):
        return self.combine(self.dispatch(h, p) + self.tags, p)

    def repeat(self, times, step, h, seen):
        for _ in range(times):
            h, seen = step(h, seen)
        return h, seen

    def choose(self, p, ways, h, seen):
        return ways[0 if self.inputs.flags.ravel()[0] > p else 1](h, seen)

    def psum(self, h):
        return np.broadcast_to(h.sum(1, keepdims=True), h.shape)

    def shift(self, h):
        return np.roll(h, 1, axis=1)

    def delay(self, h):
        return h

    def maybe(self, step, h, seen):
        return step(h, seen)


# ---- Compiling and running programs.


def random_structure(rng, index) -> Structure:
    is_global = index % 5 == 4
    names = [name for name in OPS if name != "maybe" and not (is_global and name in ON_RANKS)]
    num_ops = int(rng.integers(1, 8))
    ops = [(str(rng.choice(names)), int(rng.integers(NUM_PLANS))) for _ in range(num_ops)]
    ops.insert(int(rng.integers(num_ops + 1)), (CALLS[index % len(CALLS)], 0))
    if index % 5 == 1:  # then a call at which a rank that was missing gets the error
        at = int(rng.integers(num_ops + 1))
        ops[at:at] = [("maybe", 1), ("move", 2)]
    groups = 1 if is_global else int(rng.choice([1, 2, 4]))
    devices = rng.permutation(NUM_DEVICES) if index % 2 else range(NUM_DEVICES)
    dtype = str(rng.choice(["float32", "bfloat16", "int32"]))
    devices = tuple(int(device) for device in devices)
    return Structure(groups, devices, dtype, is_global, bool(rng.integers(2)), tuple(ops))


class Program:
    """One compiled structure: from NumPy inputs to device results."""

    def __init__(self, structure: Structure, buffer: int):
        devices = np.array(jax.devices())[list(structure.devices)]
        mesh = Mesh(devices.reshape(structure.groups, -1), ("data", "cp"))
        self.structure, self.rows = structure, P("data", "cp")

        def everywhere(inputs):
            h = inputs.x
            on = OnDevices(structure, mesh, inputs, buffer)
            seen = 0 * jnp.broadcast_to(h[:1, :1], (len(on.tags), F))
            for name, p in structure.ops:
                h, seen = OPS[name](on, h, seen, p)
            return h, seen

        def on_rank(inputs):
            outs = everywhere(jax.tree.map(lambda a: a[0, 0], inputs))
            return jax.tree.map(lambda a: a[None, None], outs)

        if structure.is_global:
            self.run = jax.jit(everywhere)
            self.place = NamedSharding(mesh, P("cp"))
        else:
            specs = {"in_specs": (self.rows,), "out_specs": self.rows}
            mapped = jax.shard_map(on_rank, mesh=mesh, check_vma=structure.check_vma, **specs)
            self.run, self.place = jax.jit(mapped), NamedSharding(mesh, self.rows)

    def start(self, inputs: Inputs):
        """Launches the program; the results may not be ready yet."""
        structure, W = self.structure, self.structure.num_ranks
        plans = tuple(
            jax.tree.map(lambda *a: np.stack(a), *(cp.Metadata(**plan) for plan in plans))
            for plans in inputs.plans
        )
        inputs = inputs._replace(x=inputs.x.astype(structure.dtype), plans=plans)
        if structure.is_global:
            inputs = jax.tree.map(lambda a: a[0], inputs)
            inputs = inputs._replace(x=inputs.x.reshape(W * T, F))
        return self.run(jax.device_put(inputs, self.place))

    def finish(self, results):
        """Waits; returns the results as int64 [groups, ranks, rows, F]."""
        shape = (self.structure.groups, self.structure.num_ranks, -1, F)
        return [np.asarray(x).astype(np.int64).reshape(shape) for x in results]


def expected(structure: Structure, inputs: Inputs):
    """Returns the results, and their number of exchanges."""
    on = OnOracle(structure, inputs)
    h, seen = inputs.x, np.zeros((structure.groups, structure.num_ranks, CAPACITY, F), int)
    for name, p in structure.ops:
        h, seen = OPS[name](on, h, seen, p)
    return (h, seen), on.num_exchanges


def random_inputs(rng, structure: Structure) -> Inputs:
    G, W = structure.groups, structure.num_ranks

    def plan():
        made = random_plan(rng, W, S, T, C)
        silent, deaf = rng.random((2, W)) < rng.choice([0, 0.3])
        dst = made["dst_rank"]
        dst[silent[:, None, None] | ((dst >= 0) & deaf[dst])] = -1
        counts = np.zeros((W, W), np.int64)
        src, slot, replica = np.nonzero(dst >= 0)
        np.add.at(counts, (dst[src, slot, replica], src), made["seq_len"][src, slot])
        totals = counts.sum(1)
        made["num_recv_tokens"] = np.c_[counts, totals].astype(np.uint32)
        made["num_total_recv_tokens"] = totals.astype(np.uint32)
        return made

    return Inputs(
        x=rng.integers(-8, 9, (G, W, T, F)),
        plans=tuple([plan() for _ in range(G)] for _ in range(NUM_PLANS)),
        delays=(rng.integers(0, 300, (G, W)) * (rng.random((G, W)) < 0.3)).astype(np.int32),
        is_here=np.ones((G, W), bool),
        flags=np.full((G, W), rng.integers(NUM_PLANS), np.int32),
    )


def can_fail(structure: Structure) -> bool:
    """XLA's ppermute waits for the devices of all groups, including a group that failed."""
    return structure.groups == 1 or "ppermute" not in dict(structure.ops)


def spoil(rng, structure: Structure, inputs: Inputs) -> tuple[Inputs, str]:
    """Returns inputs that must fail, and the expected error."""
    inputs.flags[:] = NUM_PLANS  # every "cond" uses plan 0
    G, W = structure.groups, structure.num_ranks
    group, rank, other = int(rng.integers(G)), int(rng.integers(W)), int(rng.integers(W))
    if ("maybe", 1) in structure.ops and rng.random() < 0.7:
        inputs.is_here[group, rank] = False
        return inputs, (
            rf"deadline of {1000 * SHORT_DEADLINE:.0f} ms passed: {W - 1}/{W} ranks "
            rf".*missing ranks \[{rank}\]"
        )
    counts = inputs.plans[0][group]["num_recv_tokens"]
    if rng.random() < 0.5:
        counts[rank, W] = CAPACITY + 1
        return inputs, f"rank {rank} would receive {CAPACITY + 1} tokens but capacity"
    counts[rank, other] += 1
    return inputs, f"rank {rank} expects {counts[rank, other]} tokens from rank {other} "


# ---- Threads.


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
