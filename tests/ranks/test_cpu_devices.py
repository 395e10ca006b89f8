"""One process: threads and memory of CPU devices, cleared caches, forks, random programs."""

import os
import pathlib
import re
import subprocess
import sys
import types
import warnings

import pytest

from jax_cp_dispatch import cpu_devices

STRESS = pathlib.Path(__file__).parents[1] / "stress/stress.py"


def run(*program, **environment):
    """Runs in a separate process, whose hang or crash does not end this one."""
    names = ("PJRT_NPROC", "NPROC", "JAX_NUM_CPU_DEVICES", "GLIBC_TUNABLES")
    inherited = {k: v for k, v in os.environ.items() if k not in names and "MALLOC_" not in k}
    done = subprocess.run(
        [sys.executable, *program], env={**inherited, **environment}, capture_output=True,
        text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


STARTED = """
import ctypes, os, resource, warnings
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jax_cp_dispatch.cpu_devices import start_cpu_devices, warn_of_deadlock

c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def faults_of_a_large_array():
    before = faults()
    memory = c.malloc(1 << 27)
    ctypes.memset(memory, 1, 1 << 27)
    c.free(ctypes.c_void_p(memory))
    return faults() - before
returned = [faults_of_a_large_array() for _ in range(2)]

start_cpu_devices(8)
start_cpu_devices(2)  # nothing has started yet: the last one counts
kept = [faults_of_a_large_array() for _ in range(2)]
assert returned[1] >= 100 and kept[1] < 100, (returned, kept)
assert jax.device_count() == 2
start_cpu_devices(2)
try:
    start_cpu_devices(4)
except RuntimeError as error:
    assert "JAX has started with 2 CPU devices but needs 4" in str(error), error
else:
    raise SystemExit("was not refused")
warnings.simplefilter("error")
warn_of_deadlock(2)

mesh = Mesh(np.array(jax.devices()), ("cp",))
step = jax.jit(jax.shard_map(
    lambda x: jax.lax.pmean(x, "cp"), mesh=mesh, in_specs=P("cp"), out_specs=P("cp"),
    check_vma=False,
))
x = np.ones(2, np.float32)
for _ in range(1000):  # all in flight: with fewer threads it never ends on jaxlib 0.10 and 0.11
    x = step(x)
print(float(x.sum()), os.environ["PJRT_NPROC"])
"""


def test_start_cpu_devices_keeps_freed_memory_and_runs_a_long_chain_of_programs():
    """A large array gets the pages of the one before."""
    assert run("-c", STARTED, PJRT_NPROC="3").split() == ["2.0", "16"]


OWN = len(os.sched_getaffinity(0))
FEW = max(2, OWN // 2 + 1)  # devices


@pytest.mark.parametrize(
    "version, num_devices, environment, num_threads",
    [
        ("0.11.2", 8, {"PJRT_NPROC": "15"}, 15),
        ("0.10.2", 8, {"PJRT_NPROC": "16"}, None),
        ("0.11.0.dev20260101", 4, {"PJRT_NPROC": "4"}, 4),
        ("0.12.0.1", 8, {"PJRT_NPROC": "2"}, None),
        ("0.10.2", 1, {"PJRT_NPROC": "1"}, None),
        ("0.10.2", 8, {"PJRT_NPROC": "9", "NPROC": "16"}, 9),
        ("0.10.2", 8, {"PJRT_NPROC": "many", "NPROC": "10"}, 10),
        ("0.10.2", 8, {"NPROC": "5"}, 8),
        ("0.10.2", FEW, {}, max(OWN, FEW)),
    ],
)
def test_warns_once_if_programs_can_deadlock(
    monkeypatch, version, num_devices, environment, num_threads
):
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cpu_devices, "_has_warned", False)
    monkeypatch.setattr(cpu_devices.jaxlib.version, "__version__", version)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            cpu_devices.warn_of_deadlock(num_devices)
    assert len(seen) == (num_threads is not None)
    for warning in seen:
        assert warning.category is RuntimeWarning
        runs = f"jaxlib {version} runs the programs of {num_devices} CPU devices on {num_threads} "
        assert runs in str(warning.message)
        advice = f"Set the environment variable PJRT_NPROC={2 * num_devices} before JAX is used"
        assert advice in str(warning.message)


def test_no_device():
    with pytest.raises(ValueError, match="num_devices is 0"):
        cpu_devices.start_cpu_devices(0)


@pytest.mark.parametrize(
    "environment, enable, num_options",
    [
        ({}, True, 4),
        ({}, False, 0),
        ({"MALLOC_ARENA_MAX": "2"}, True, 0),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, True, 0),
    ],
)
def test_keep_freed_memory_unless_the_environment_configures_it(
    monkeypatch, environment, enable, num_options
):
    asked = []
    library = types.SimpleNamespace(mallopt=lambda *option: asked.append(option))
    monkeypatch.setattr(cpu_devices.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(cpu_devices, "_memory_is_settled", False)
    for name in list(os.environ):
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for again in (enable, True):  # settled by the first: nothing more
        cpu_devices.keep_freed_memory(enable=again)
        assert len(asked) == num_options


PROGRAM = """
import os, sys
import jax, numpy as np
from jax_cp_dispatch.cpu_devices import start_cpu_devices
start_cpu_devices(4)
import jax_cp_dispatch as cpd

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("cp",))
rows = jax.sharding.PartitionSpec("cp")
plan, _ = cpd.compute_metadata(np.full((4, 2), 3), np.arange(8).reshape(4, 2) % 4)
x = np.arange(24 * 2, dtype=np.float32).reshape(24, 2)

def move(x, plan):
    return cpd.dispatch(x, plan, axis_name="cp", capacity=6, deadline=2)

def compiled(move):
    return jax.jit(jax.shard_map(move, mesh=mesh, in_specs=rows, out_specs=rows))

def check(fn):
    np.testing.assert_array_equal(
        np.asarray(fn(x, plan)).reshape(4, 6, 2),
        cpd.scenarios.orchestrate_simulate(x.reshape(4, 6, 2), np.zeros((4, 6, 2), "f"), plan),
    )

fn = compiled(move)
for _ in range(3):
    check(fn)
    jax.clear_caches()
check(fn)
for name in [name for name in sys.modules if name.startswith("jax_cp_dispatch")]:
    if not name.endswith("._cpu"):
        del sys.modules[name]
import jax_cp_dispatch as again
assert again is not cpd
check(compiled(lambda x, plan: again.dispatch(
    x, again.Metadata(**{k: getattr(plan, k) for k in plan.__dataclass_fields__}),
    axis_name="cp", capacity=6)))
check(fn)
child = os.fork()
if child == 0:
    for call in (fn, compiled(lambda *args: move(*args))):
        try:
            call(x, plan)
        except RuntimeError as error:
            assert str(error).startswith("dispatch: process ") and "'spawn'" in str(error)
        else:
            os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
check(fn)
unread = [fn(x, plan) for _ in range(50)]

def lonely(x, plan):
    here = jax.lax.axis_index("cp") != 2
    return jax.lax.cond(here, move, lambda x, plan: 0 * x, x, plan)

results = compiled(lonely)(x, plan)
print("right", flush=True)
"""


def test_no_crash_and_no_hang():
    """Caches are cleared, the package is imported again, and the process forks.

    At its end, results were never asked for, and ranks wait for one that does not come.
    """
    assert run("-c", PROGRAM) == "right\n"


def test_random_programs():
    said = run(STRESS, "--programs=24", "--structures=2", "--seed=1", "--hang=600")
    numbers = r"24 programs, (\d+) failures provoked, (\d+) seen, 0 wrong"
    ((provoked, seen),) = re.findall(numbers, said)
    assert provoked == seen != "0"
