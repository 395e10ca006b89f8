"""Marks where the compilation of one program ends and that of the next begins.

Processes match the calls of a program by their order in it. XLA reports each call to the extension,
on a thread of its own, but not its program. So this process compiles one program at a time.
"""

import threading

import jax
from jax.experimental.compilation_cache import compilation_cache

from jax_cp_dispatch._jax_private import COMPILATION_EVENT
from jax_cp_dispatch._ranks import runtime

_LONGEST = 600.0  # seconds; then two programs are compiled at once, and their ranks may not meet
_one_at_a_time = threading.RLock()
_held = threading.local()  # `depth`: how often this thread holds the lock


def watch_programs() -> None:
    """Starts listening to JAX's events, and makes JAX compile every program.

    JAX numbers the executions of a program from its fingerprint. A program read from the cache on
    disk has a different fingerprint than the same program compiled by another process.
    """
    jax.monitoring.register_scalar_listener(_on_begin)
    jax.monitoring.register_event_duration_secs_listener(_on_end)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it may be initialized already


def _on_begin(event: str, value: float, **_: str | int) -> None:
    if event == COMPILATION_EVENT and _one_at_a_time.acquire(timeout=_LONGEST):
        _held.depth = getattr(_held, "depth", 0) + 1


def _on_end(event: str, duration_secs: float, **_: str | int) -> None:
    if event != COMPILATION_EVENT:
        return
    runtime.native.end_programs()
    if getattr(_held, "depth", 0):
        _held.depth -= 1
        _one_at_a_time.release()
