"""Where the compilation of one program ends and that of the next begins.

Processes agree on the calls of a program by their order in it. XLA tells the extension of each
call, but not of which program it is; JAX tells when it has compiled one.
"""

import threading

import jax
from jax.experimental.compilation_cache import compilation_cache

from jax_cp_dispatch._ranks import runtime

_lock = threading.Lock()
_threads: set[int] = set()  # that have lowered a program with calls, and not yet compiled it


def watch_programs() -> None:
    """Begins to listen to JAX, and has it compile every program.

    JAX numbers the executions of a program from its fingerprint, and what one process reads from
    the cache on disk has another one than what the next process compiles.
    """
    jax.monitoring.register_event_duration_secs_listener(_on_event)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it may have been asked before


def program_begins() -> None:
    """This thread lowers a program with calls."""
    with _lock:
        _threads.add(threading.get_ident())


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if not event.endswith("/backend_compile_duration"):
        return
    with _lock:
        _threads.discard(threading.get_ident())
        if not _threads:  # else counting begins later, when all have come to an end
            runtime.native.end_programs()
