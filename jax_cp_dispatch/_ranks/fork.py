"""Rejects exchanges in a process that was forked after JAX had started.

A fork does not copy threads, so a program over several devices would hang in the child. The child
is marked when it starts. The mark is part of JAX's compilation cache key: calls that the parent has
compiled are traced again in the child, and rejected there. The parent pays nothing.
"""

import os

import jax

from jax_cp_dispatch._jax_private import xla_bridge

_is_marked = jax.make_user_context(default_value=False)


def refuse_after_fork(op: str) -> None:
    """Raises in a forked process. Call wherever an operation is traced.

    Raises:
      RuntimeError: this process was forked after JAX had started.
    """
    if _is_marked.value:
        raise RuntimeError(
            f"{op}: process {os.getpid()} was forked from process {os.getppid()} after JAX had "
            "started there. JAX's threads are not copied, so the call would hang. Start processes "
            "with multiprocessing.get_context('spawn') or subprocess, or fork before JAX is used."
        )


def _mark() -> None:
    if xla_bridge._backends:  # backends_are_initialized takes a lock, which a fork can leave held
        _is_marked(True).__enter__()  # never left: this thread is the child's only one


os.register_at_fork(after_in_child=_mark)
