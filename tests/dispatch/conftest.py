"""Lowering for GPUs without the CUDA extension."""

import types

import pytest

from jax_cp_dispatch._ranks import runtime


@pytest.fixture
def cuda(monkeypatch):
    """Pretends that the extension exists, built or not; nothing may be executed."""
    extension = types.SimpleNamespace(
        set_process=lambda process, ordinals: None,
        take_errors=lambda: [],
        registrations=dict,
        device_count=lambda: (0, "no driver"),
    )
    monkeypatch.setattr(runtime, "cuda", extension)
    return extension
