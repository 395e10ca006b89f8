"""One process: cleared caches, a second import, forks, and exits with work in flight."""

import subprocess
import sys

import pytest

# A compiled call on 4 devices, and its expected result.
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
"""

CASES = {
    "caches cleared, the package imported again, forked": """
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
        print("right")
    """,
    "results are never asked for, and ranks wait for one that does not come": """
        check(fn)
        unread = [fn(x, plan) for _ in range(50)]
        def lonely(x, plan):
            here = jax.lax.axis_index("cp") != 2
            return jax.lax.cond(here, move, lambda x, plan: 0 * x, x, plan)
        results = compiled(lonely)(x, plan)
        print("right", flush=True)
    """,
}


@pytest.mark.parametrize("case", CASES)
def test_no_crash_and_no_hang(case, tmp_path):
    lines = [line[8:] for line in CASES[case].splitlines()]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\n".join(lines))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "right\n"
