"""The self-test of `ragged_all_to_all` in a job: two real processes, CPU devices as their GPUs.

XLA's CPU backend lacks the operation; a stand-in made from an all-gather moves rows between the
processes. What NCCL does is not tested here. What the self-test of one process
finds: test_xla_rows.py.
"""

import pathlib

import pytest
from launching import outputs_of
from scenes import of_scene


@pytest.fixture(scope="module")
def outputs():
    """What each of two processes printed, in all scenes."""
    process = pathlib.Path(__file__).with_name("ragged_process.py")
    return outputs_of(2, process, JAX_NUM_CPU_DEVICES="1")


@pytest.mark.parametrize(
    "scene, may, reason",
    [
        ("right", True, None),
        ("wrong on one", False, "ragged_all_to_all failed its self-test"),
        ("not implemented on one", False, "ragged_all_to_all cannot run here: UNIMPLEMENTED"),
        ("late", False, "ragged_all_to_all: not all processes came within 3 s"),
    ],
)
def test_all_processes_choose_alike(outputs, scene, may, reason):
    for out in (of_scene(scene, out) for out in outputs):
        assert f"chose {may}: " in out, out
        assert ("chose True: []" in out) if reason is None else (reason in out), out
