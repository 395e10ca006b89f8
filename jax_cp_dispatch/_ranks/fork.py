"""Refuses to move rows in a process that was forked after JAX had started.

A fork copies no threads, so a program of several devices waits there for ever. The child is marked
when it begins; the mark is part of the key under which JAX keeps compiled programs, so that calls
which the parent had compiled are traced again and refused too, at no cost for the parent.
"""

import os
from typing import Any

import jax

_is_marked = jax.make_user_context(default_value=False)


def refuse_after_fork(op: str) -> None:
    """Call wherever an operation is traced.

    Raises:
      RuntimeError: this process was forked after JAX had started.
    """
    if _is_marked.value:
        raise RuntimeError(
            f"{op}: process {os.getpid()} was forked from process {os.getppid()} after JAX had "
            "started there; JAX's threads are not copied, so the call would wait for ever. Start "
            "processes with multiprocessing.get_context('spawn') or subprocess, or fork before "
            "JAX is used."
        )


def _mark() -> None:
    if _backend_has_started():
        _is_marked(True).__enter__()  # for good: this thread is the child's only one


def _backend_has_started() -> bool:
    """JAX refuses to change the number of devices once its backend is up."""
    config: Any = jax.config  # its options are not known to type checkers
    num_devices = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", num_devices + 1)
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", num_devices)
    return False


os.register_at_fork(after_in_child=_mark)
