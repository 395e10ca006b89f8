"""One process of test_ragged_processes.py: decides with the others, on CPU devices as its GPUs."""

import pathlib
import sys
import warnings

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))

import jax
import ragged as stand_in
import scenes
from jax import lax

from jax_cp_dispatch._dispatch import ragged_choice
from jax_cp_dispatch._ranks.job import publish_and_read_all

ADDRESS, PROCESS = sys.argv[1], int(sys.argv[2])
_is_equal = ragged_choice._is_equal
lax.ragged_all_to_all = stand_in.ragged_all_to_all


def found_by_this_process(scene):
    """What the self-test finds. In one scene it runs; in others it is given."""
    if scene == "not implemented on one" and PROCESS == 1:
        raise NotImplementedError("UNIMPLEMENTED")
    if scene == "right":
        return _is_equal()
    return not (scene == "wrong on one" and PROCESS == 1)


def choose(scene):
    ragged_choice._is_equal = lambda: found_by_this_process(scene)
    ragged_choice._passes.cache_clear()
    if scene == "late":
        ragged_choice._TIMEOUT = 3.0
    if scene == "late" and PROCESS == 1:
        publish_and_read_all("test", "process 0 has chosen", None, 600.0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        may = ragged_choice.may_be_ragged(["cuda"], None)
        assert ragged_choice.may_be_ragged(["cuda"], None) is may, "decided once"
    if scene == "late" and PROCESS == 0:
        publish_and_read_all("test", "process 0 has chosen", None, 600.0)
    reasons = [str(warning.message) for warning in found if "all-gather" in str(warning.message)]
    print(f"chose {may}: {reasons}", flush=True)


jax.distributed.initialize(ADDRESS, 2, PROCESS)
assert jax.device_count() == 2 and jax.process_count() == 2
jax.default_backend = lambda: "gpu"
scenes.play(("right", "wrong on one", "not implemented on one", "late"), choose)
