"""The self-test of `ragged_all_to_all` in a job: two real processes, CPU devices as their GPUs.

XLA's CPU backend lacks the operation; a stand-in made from an all-gather moves rows between the
processes. What NCCL does is not tested here. What the self-test of one process
finds: test_xla_rows.py. As a program, this file is one of the processes.
"""

import pathlib
import sys
import warnings

if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))

import jax
import pytest
import ragged as stand_in
from jax import lax
from launching import outputs_of
from scenes import of_scene, play

from jax_cp_dispatch._dispatch import ragged_choice  # inner: GPUs are pretended
from jax_cp_dispatch._ranks.job import publish_and_read_all  # inner: lets a process come late

SCENES = {
    "right": (True, None),
    "wrong on one": (False, "ragged_all_to_all failed its self-test"),
    "not implemented on one": (False, "ragged_all_to_all cannot run here: UNIMPLEMENTED"),
    "late": (False, "ragged_all_to_all: not all processes came within 3 s"),
}


@pytest.fixture(scope="module")
def outputs():
    """What each of two processes printed, in all scenes."""
    return outputs_of(2, pathlib.Path(__file__), JAX_NUM_CPU_DEVICES="1")


@pytest.mark.parametrize("scene", SCENES)
def test_all_processes_choose_alike(outputs, scene):
    may, reason = SCENES[scene]
    for out in (of_scene(scene, out) for out in outputs):
        assert f"chose {may}: " in out, out
        assert ("chose True: []" in out) if reason is None else (reason in out), out


def play_process(address, process):
    """Decides with the others in every scene."""
    is_equal = ragged_choice._is_equal
    lax.ragged_all_to_all = stand_in.ragged_all_to_all

    def found_by_this_process(scene):
        """What the self-test finds. In one scene it runs; in others it is given."""
        if scene == "not implemented on one" and process == 1:
            raise NotImplementedError("UNIMPLEMENTED")
        if scene == "right":
            return is_equal()
        return not (scene == "wrong on one" and process == 1)

    def choose(scene):
        ragged_choice._is_equal = lambda: found_by_this_process(scene)
        ragged_choice._passes.cache_clear()
        if scene == "late":
            ragged_choice._TIMEOUT = 3.0
        if scene == "late" and process == 1:
            publish_and_read_all("test", "process 0 has chosen", None, 600.0)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            may = ragged_choice.may_be_ragged(["cuda"], None)
            assert ragged_choice.may_be_ragged(["cuda"], None) is may, "decided once"
        if scene == "late" and process == 0:
            publish_and_read_all("test", "process 0 has chosen", None, 600.0)
        said = [str(warning.message) for warning in found]
        print(f"chose {may}: {[text for text in said if 'all-gather' in text]}", flush=True)

    jax.distributed.initialize(address, 2, process)
    assert jax.device_count() == 2 and jax.process_count() == 2
    jax.default_backend = lambda: "gpu"
    play(SCENES, choose)


if __name__ == "__main__":
    play_process(sys.argv[1], int(sys.argv[2]))
