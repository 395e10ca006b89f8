"""GPUs that wait for other ranks: what is said of them, and checkpoints after a failed exchange.

No GPU is needed: what the extension says is pretended.
"""

import importlib.util

import jax.numpy as jnp
import pytest
from inner import pretend_cuda, wait_log

from jax_cp_dispatch import gpu

OP = "dispatch over axis 'cp'"


def rank_that_waits(rank, call=7, missing=(5,), channel=1):
    return channel, OP, rank, call, list(missing), [9] * len(missing)


def test_who_is_missing_is_said_after_a_minute_and_then_seldom():
    log = wait_log()
    said = {}
    for now in map(float, range(0, 3 * 3600, 10)):
        for text in log.due([rank_that_waits(0), rank_that_waits(2, missing=(5, 6))], now):
            said[now] = text
    assert list(said) == [60, 600, 6000]
    assert said[600].startswith(
        f"{OP} has waited 600 s for ranks [5, 6] (processes [9]) to come to call 7. They may be "
    )
    # The ranks came, and later others wait in the next call: its time counts from there.
    assert log.due([], 11_000.0) == log.due([rank_that_waits(0, call=8)], 11_010.0) == []
    assert log.due([rank_that_waits(0, call=8)], 11_060.0) == []
    assert len(log.due([rank_that_waits(0, call=8)], 11_070.0)) == 1


def test_calls_that_wait_can_be_read_at_any_time(monkeypatch):
    pretend_cuda(monkeypatch, waiting_ranks=lambda: [rank_that_waits(2), rank_that_waits(0)])
    (call,) = gpu.waiting_calls()
    assert call[:5] == (OP, 7, (0, 2), (5,), (9,)) and call.seconds >= 0
    pretend_cuda(monkeypatch, waiting_ranks=list)
    assert gpu.waiting_calls() == []


def test_a_state_with_an_error_is_not_saved(monkeypatch, tmp_path):
    """By Orbax; nothing is there afterwards, and the next checkpoint is complete."""
    if importlib.util.find_spec("orbax") is None:
        pytest.skip("orbax is not installed")
    import orbax.checkpoint as ocp

    found = ["dispatch over axis 'cp': rank 1 waited"]
    pretend_cuda(monkeypatch, take_errors=lambda: [found.pop() for _ in list(found)])
    state = {"w": jnp.arange(4.0)}
    with ocp.CheckpointManager(tmp_path) as manager:
        save = lambda step: manager.save(
            step, args=ocp.args.StandardSave(gpu.check_before_save(state))
        )
        with pytest.raises(RuntimeError, match="rank 1 waited"):
            save(10)
        manager.wait_until_finished()
        assert manager.latest_step() is None and not any(tmp_path.glob("*10*"))
        save(20)
        manager.wait_until_finished()
        assert manager.latest_step() == 20
        restored = manager.restore(20, args=ocp.args.StandardRestore(state))
    assert (restored["w"] == state["w"]).all()
