"""How processes start and end: mistakes, hosts, process 0 leaves, a killed one is resumed.

    python -m jax_cp_dispatch.launch tests/processes/starts.py PROGRAM [ARGUMENT ...]

Except of `end`, which joins without the launcher.
"""

import importlib
import os
import pathlib
import re
import signal
import sys
import time
import warnings
from typing import Any

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, PartitionSpec as P
from movement_oracle import dispatched
from places import AXIS, check, draw, mesh_of_all, on_ranks, place, plan_of

import jax_cp_dispatch as cp
from jax_cp_dispatch._ranks.processes import ending  # inner: waits for minutes by default
from jax_cp_dispatch.cpu_devices import start_cpu_devices


def mistakes():
    """Without these errors, every process would silently compute alone, or on more devices."""

    def devices():
        """The number of devices is that of the launcher."""
        start_cpu_devices(1)
        start_cpu_devices(8)

    def forgotten():
        """Without `initialize`, each process would compute alone."""
        q = jnp.zeros((1, 8, 1, 8))
        mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
        cp.context_parallel_attention(q, q, q, mesh=mesh, axis_name=AXIS, algorithm="ring")

    messages = {
        devices: "start_cpu_devices: this is one of 2 processes with 1 CPU devices each, but "
        "num_devices is 8. Call it only in a program of one process",
        forgotten: "context_parallel_attention: the launcher started 2 processes, but this one "
        "has not joined the others and would compute alone. Call jax_cp_dispatch.initialize()",
        # The mistake before this one has started JAX.
        cp.initialize: "initialize: JAX has already started in this process, with the devices of "
        "this process alone. Call initialize before jax.devices()",
    }
    for mistake, message in messages.items():
        try:
            mistake()
        except RuntimeError as error:
            assert str(error).startswith(message), error
        else:
            sys.exit(f"{mistake.__name__} was not reported")


def as_if_another(what):
    """Process 1 says that its host or its program version is another one."""
    module = importlib.import_module("jax_cp_dispatch._ranks.processes.initialize")
    if os.environ["JAX_PROCESS_ID"] == "1":
        own = getattr(module, f"_{what}")()
        setattr(module, f"_{what}", lambda: own + " of another")


def other_version():
    as_if_another("version")
    try:
        cp.initialize()
    except RuntimeError as error:
        said = str(error)
        assert "process 1 (pid " in said
        assert "runs another program version. Expected, as in process 0: jax_cp_dispatch" in said
        assert said.count("build ") == 2
    else:
        sys.exit("nothing was refused")


def other_host():
    """XLA's collectives serve, and a warning says so."""
    as_if_another("host")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        choice = cp.initialize()
        assert choice.implementation == "xla"
        assert choice.reason.startswith("process 1 runs on host ")
        mesh, num_ranks = mesh_of_all(), jax.device_count()
        plan, capacity = plan_of(0, num_ranks)
        rows = draw(0, num_ranks, 2)
        x, m = jax.tree.map(lambda a: place(a, mesh), (rows, cp.Metadata(**plan)))
        move = on_ranks(lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity), mesh)
        check(move(x, m), dispatched(plan, rows, capacity))
    ours = [w for w in seen if "jax_cp" in str(w.message)]
    assert any("dispatch: moves rows with XLA's collectives" in str(w.message) for w in ours)
    assert all(w.category is UserWarning for w in ours)
    assert cp.available_implementations()["shared_memory"] == (False, choice.reason)


def train(folder, steps, lost=None):
    """Saves parameters after every second step, and resumes from what it finds.

    Process `lost` kills itself before the last step. The first one prints each loss exactly.
    """
    folder, steps, columns = pathlib.Path(folder), int(steps), 66
    cp.initialize()
    mesh = mesh_of_all()
    placement = cp.place_tokens((30, 5, 31), world_size=jax.device_count(), columns=columns)
    put = lambda spec, part: jax.tree.map(lambda x: place(x, mesh, spec), part)
    documents = placement.documents
    documents = jax.tree.map(put, documents.specs(AXIS), documents)

    def batch_of(step):
        x = np.random.default_rng(step).standard_normal((1, columns, 8)).astype(np.float32)
        return place(placement.apply(x), mesh, P(None, AXIS))

    def loss(w, x, documents):
        q, k, v = (jnp.einsum("btd,dh->bth", x, part)[:, :, None] for part in w)
        options: Any = {"mesh": mesh, "axis_name": AXIS, "algorithm": "placed", "deadline": 30.0}
        out = cp.context_parallel_attention(q, k, v, documents=documents, **options)
        return jnp.mean((out[:, :, 0] - x) ** 2)

    @jax.jit
    def train_step(w, x, documents):
        value, gradient = jax.value_and_grad(loss)(w, x, documents)
        return w - 0.1 * gradient, value

    saved = sorted(folder.glob("*.npy"))
    first = int(saved[-1].stem) if saved else 0
    start = np.random.default_rng(0).standard_normal((3, 8, 8)).astype(np.float32) / 4
    w = place(np.load(saved[-1]) if saved else start, mesh, P())
    for step in range(first + 1, steps + 1):
        if step == steps and str(jax.process_index()) == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        w, value = jax.block_until_ready(train_step(w, batch_of(step), documents))
        if jax.process_index() == 0:
            print(f"step {step}: {float(value).hex()}", flush=True)
            if step % 2 == 0:
                np.save(folder / f"{step:04}.npy", np.asarray(w))


def end(address, num_processes, process, folder, how):
    """Process 1 still has work when process 0 is done, which ends explicitly, raises, exits or
    leaves."""
    last_line = pathlib.Path(folder, "0 is at its last line")
    choice = cp.initialize(address, int(num_processes), int(process))
    assert choice.implementation == "shared_memory" and jax.device_count() == 2
    if process == "0":
        last_line.touch()
        if how == "explicitly":
            jax.distributed.shutdown()
        if how == "raises":
            raise RuntimeError("process 0 fails")
        if how == "exits":
            sys.exit(3)
        if how == "leaves":
            ending._LONGEST_SECONDS = 0.5
        return
    while not last_line.exists():
        time.sleep(0.01)
    plan, _ = cp.compute_metadata(np.full((2, 1), 4), np.array([[1], [0]]))
    move = lambda: cp.dispatch(np.zeros((4, 1)), plan, axis_name=AXIS, capacity=4, deadline=0.5)
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    mapped = jax.shard_map(move, mesh=mesh, in_specs=(), out_specs=P(AXIS))
    try:
        jax.block_until_ready(jax.jit(mapped)())
    except jax.errors.JaxRuntimeError as error:
        print(*re.findall(r"missing ranks \[0\]", str(error)), flush=True)
    time.sleep(3)  # enough time for JAX to end this process, if no other process waited for it
    client: Any = distributed.global_state.client
    client.key_value_set("still", "there")


PROGRAMS = {x.__name__: x for x in (mistakes, other_version, other_host, train, end)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
    print(f"{sys.argv[1]}: done", flush=True)
