"""Places calls on XLA's collective stream, so that XLA overlaps them with computation."""

import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import compute_on

_VARIABLE = "JAX_CP_DISPATCH_COLLECTIVE_STREAM"
_on_stream: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)  # renamed in jax 0.11.1


def on_collective_stream(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` as one asynchronous operation, which XLA schedules like one of its collectives.

    XLA knows this stream since jaxlib 0.10.1 (https://github.com/openxla/xla/pull/39604). With
    `JAX_CP_DISPATCH_COLLECTIVE_STREAM=0` it returns `fn`: the call then runs on the stream of the
    computation. XLA may record calls on either stream into command buffers. The variable holds for
    all calls, so those that share a channel are on one stream.
    """
    if os.environ.get(_VARIABLE, "1") == "0":
        return fn
    device = jax.memory.Space.Device
    return _on_stream(fn, compute_type="gpu_stream:collective", out_memory_spaces=device)
