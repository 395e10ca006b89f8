"""Hooks into the package that several files of tests need, and that no public function offers."""

import types
from typing import Any

from jax_cp_dispatch._ranks import runtime  # inner: the extensions, and one that is pretended
from jax_cp_dispatch._text import say_once  # inner: a warning comes once in a process
from jax_cp_dispatch.attention.algorithms import parts_of_heads  # inner: as between GPUs
from jax_cp_dispatch.global_call import mesh_axes  # inner: a warning comes once in a process


def warn_again() -> None:
    """Forgets which warnings were given."""
    say_once.cache_clear()
    mesh_axes._warned.clear()


def calls_in_flight(buffer: int) -> int:
    """Returns how many calls use a dispatch buffer now, one per rank."""
    return runtime.native.find_buffer("test", buffer)


def pretend_cuda(monkeypatch, **functions: Any) -> None:
    """Puts these functions in place of the extension for GPUs, built or not; nothing can run."""
    monkeypatch.setattr(runtime, "cuda", types.SimpleNamespace(**functions))


def cut_heads(monkeypatch) -> None:
    """Lets attention by a plan move two parts of heads, as exchanges between GPUs do."""
    monkeypatch.setattr(parts_of_heads, "moves_beside_work", lambda _: True)
