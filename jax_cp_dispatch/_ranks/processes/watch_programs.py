"""Marks where the compilation of one program ends and that of the next begins.

Processes match the calls of a program by their order in it. XLA reports each call to the extension,
but not its program. JAX reports when a program is compiled.
"""

import threading

import jax
from jax.experimental.compilation_cache import compilation_cache

from jax_cp_dispatch._ranks import runtime

_lock = threading.Lock()
_threads: set[int] = set()  # that have lowered but not yet compiled a program with calls


def watch_programs() -> None:
    """Starts listening to JAX's events, and makes JAX compile every program.

    JAX numbers the executions of a program from its fingerprint. A program read from the cache on
    disk has a different fingerprint than the same program compiled by another process.
    """
    jax.monitoring.register_event_duration_secs_listener(_on_event)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it may be initialized already


def program_begins() -> None:
    """Records that this thread lowers a program with calls."""
    with _lock:
        _threads.add(threading.get_ident())


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if not event.endswith("/backend_compile_duration"):
        return
    with _lock:
        _threads.discard(threading.get_ident())
        if not _threads:  # otherwise counting starts when all have finished
            runtime.native.end_programs()
