"""Messages of `initialize` if memory cannot be shared. The launcher runs it with the fault's name.

python -m jax_cp_dispatch.launch tests/processes/choices.py host | version
"""

import importlib
import pathlib
import sys
import warnings

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import numpy as np
from movement_oracle import dispatched
from places import AXIS, check, draw, mesh_of_all, on_ranks, place, plan_of

import jax_cp_dispatch as cp
from jax_cp_dispatch._ranks.processes import coordination

module = importlib.import_module("jax_cp_dispatch._ranks.processes.initialize")
wrong = sys.argv[1]
process = int(coordination.os.environ["JAX_PROCESS_ID"])
if process == 1:  # as if it belonged to another host
    own = getattr(module, f"_{wrong}")()
    setattr(module, f"_{wrong}", lambda: own + " of another")

if wrong == "version":
    try:
        cp.initialize()
    except RuntimeError as error:
        assert "process 1 (pid " in str(error)
        assert "runs another program version. Expected, as in process 0: jax_cp_dispatch" in str(
            error
        )
        assert str(error).count("build ") == 2
        print("version ok", flush=True)
        sys.exit(0)
    sys.exit("nothing was refused")

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    choice = cp.initialize()
    assert choice.implementation == "xla"
    assert choice.reason.startswith("process 1 runs on host ")
    mesh, W = mesh_of_all(), jax.device_count()
    plan, capacity = plan_of(0, W)
    x, m = jax.tree.map(lambda a: place(a, mesh), (draw(0, W, 2), cp.Metadata(**plan)))
    move = on_ranks(lambda x, m: cp.dispatch(x, m, axis_name=AXIS, capacity=capacity), mesh)
    check(move(x, m), dispatched(plan, draw(0, W, 2), capacity))
assert any("dispatch: moves rows with XLA's collectives" in str(w.message) for w in seen)
assert cp.available_implementations()["shared_memory"] == (False, choice.reason)
assert np.all([w.category is UserWarning for w in seen if "jax_cp" in str(w.message)])
print("host ok", flush=True)
