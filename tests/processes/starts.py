"""How processes start and end: mistakes, other hosts, and how process 0 leaves.

    python -m jax_cp_dispatch.launch tests/processes/starts.py PROGRAM [ARGUMENT ...]

Except of `ends`, which forks the processes of its jobs.
"""

import contextlib
import os
import pathlib
import re
import resource
import sys
import time
import warnings
from functools import partial
from typing import Any
from unittest import mock

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import numpy as np
from inner import leave_after, pretend
from jax._src import distributed
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from movement_oracle import dispatched
from places import AXIS, check, draw, mesh_of_all, on_ranks, place_all, plan_of
from scenes import OfScene

import jax_cp_dispatch as cp
from jax_cp_dispatch.cpu_devices import start_cpu_devices


def error_of(call) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    sys.exit(f"{call} was not refused")


def joins():
    """Mistakes before `initialize`; errors of it, after each of which it is called again."""

    def devices():
        """The number of devices is that of the launcher."""
        start_cpu_devices(2)
        start_cpu_devices(8)

    assert error_of(devices).startswith(
        "start_cpu_devices: this is one of 2 processes with 2 CPU devices each, but num_devices is "
        "8. Call it only in a program of one process"
    )
    # Without `initialize`, each process would compute alone.
    q = jax.ShapeDtypeStruct((1, 8, 1, 8), np.float32)
    mesh = AbstractMesh((2,), (AXIS,))
    attend = partial(cp.context_parallel_attention, mesh=mesh, axis_name=AXIS, algorithm="ring")
    assert error_of(lambda: jax.eval_shape(attend, q, q, q)).startswith(
        "context_parallel_attention: the launcher started 2 processes, but this one "
        "has not joined the others and would compute alone. Call jax_cp_dispatch.initialize()"
    )
    # What is not given, JAX finds out itself.
    left_to_jax = mock.patch.object(jax.distributed, "initialize", side_effect=RuntimeError("JAX"))
    with mock.patch.dict(os.environ), left_to_jax:
        address = os.environ.pop("JAX_COORDINATOR_ADDRESS")
        for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_CP_DISPATCH_HOSTED_COORDINATION"):
            os.environ.pop(name, None)
        for given in {"process_id": 1}, {"coordinator_address": address, "num_processes": 2}:
            assert error_of(partial(cp.initialize, **given)) == "JAX", given
    is_other = os.environ["JAX_PROCESS_ID"] == "1"
    with open_files(18):
        said = error_of(cp.initialize)
    of_error = (
        r"initialize: this process may open 18 files; with 2 processes it needs (\d+) or more"
    )
    (needed,) = map(int, re.findall(of_error, said))
    with open_files(needed + 3), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pretend("version", "another") if is_other else mock.MagicMock():
            said = error_of(cp.initialize)
    (warned,) = [str(w.message) for w in seen if "may open" in str(w.message)]
    of_warning = "XLA's collectives over all devices of 2 processes need about"
    (of_all,) = map(int, re.findall(rf"may open {needed + 3} files. {of_warning} (\d+)", warned))
    assert abs(of_all - needed - 2 * 3) < 3  # 2 devices connect to 3 others each
    assert "process 1 (pid " in said
    assert "runs another program version. Expected, as in process 0: jax_cp_dispatch, build" in said
    assert "Seen: another" in said
    with pretend("host", "another") if is_other else mock.MagicMock():
        other_host()


@contextlib.contextmanager
def open_files(limit):
    """Limits how many files this process may open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def other_host():
    """XLA's collectives serve, and a warning says so."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        state: Any = distributed.global_state
        with mock.patch.object(state, "client", OfScene(state.client, "again")):
            choice = cp.initialize()
        assert choice.implementation == "xla"
        assert choice.reason.startswith("process 1 runs on host ")
        mesh, num_ranks = mesh_of_all(), jax.device_count()
        plan, capacity = plan_of(0, num_ranks)
        rows = draw(0, num_ranks, 2)
        move = on_ranks(lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity), mesh)
        check(move(*place_all((rows, cp.Metadata(**plan)), mesh)), dispatched(plan, rows, capacity))
    ours = [w for w in seen if "jax_cp" in str(w.message)]
    assert any("dispatch: moves rows with XLA's collectives" in str(w.message) for w in ours)
    assert all(w.category is UserWarning for w in ours)
    assert cp.available_implementations()["shared_memory"] == (False, choice.reason)


HOWS = ("explicitly", "raises", "exits", "leaves")


def ends(folder, *addresses):
    """Starts a job of two processes for each way in which process 0 may end."""
    jobs = zip(HOWS, addresses, strict=True)
    places = {}
    for how, address, process in [(*job, process) for job in jobs for process in range(2)]:
        if (pid := os.fork()) == 0:
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(f"{folder}/{how}{process}.{name}", os.O_WRONLY | os.O_CREAT)
                os.dup2(file, number)
            return end(address, process, pathlib.Path(folder, f"{how}: at its last line"), how)
        places[pid] = f"{how} {process}"
    while places:
        pid, status = os.wait()
        print(f"{places.pop(pid)}: {os.waitstatus_to_exitcode(status)}")


def end(address, process, last_line, how):
    """Process 1 still has work when process 0 is done."""
    unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    with mock.patch.object(resource, "getrlimit", lambda _: unlimited):
        choice = cp.initialize(address, 2, process)
    assert choice.implementation == "shared_memory" and jax.device_count() == 2
    if process == 0:
        last_line.touch()
        if how == "explicitly":
            jax.distributed.shutdown()
        if how == "raises":
            raise RuntimeError("process 0 fails")
        if how == "exits":
            sys.exit(3)
        if how == "leaves":
            leave_after(0.5)
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


PROGRAMS = {x.__name__: x for x in (joins, ends)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
    print(f"{sys.argv[1]}: done", flush=True)
