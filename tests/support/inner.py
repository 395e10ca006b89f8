"""Hooks into the package that several files of tests need, and that no public function offers."""

import contextlib
import types
from typing import Any
from unittest import mock

from jax_cp_dispatch import global_call  # inner: a warning comes once in a process
from jax_cp_dispatch._door import door as door  # inner: annotations of no public function
from jax_cp_dispatch._ranks import (  # inner: a TPU is pretended
    gpu_waits,  # inner: the clock of those that wait
    job,  # inner: waits for minutes by default
    lowering,
    processes,
    runtime,
)
from jax_cp_dispatch._text import say_once  # inner: a warning comes once in a process
from jax_cp_dispatch.attention import rotating  # inner: kernels for TPUs
from jax_cp_dispatch.attention.algorithms import (
    exchange_once,  # inner: with and without parts
    ring,  # inner: blocks
)


def warn_again() -> None:
    """Forgets which warnings were given."""
    say_once.cache_clear()
    global_call._warned.clear()


def calls_in_flight(buffer: int) -> int:
    """Returns how many calls use a dispatch buffer now, one per rank."""
    return runtime.native.find_buffer("test", buffer)


# ---- GPUs and TPUs.


def pretend_cuda(monkeypatch, **functions: Any) -> None:
    """Puts these functions in place of the extension for GPUs, built or not; nothing can run."""
    none: dict[str, Any] = {"device_count": lambda: (0, ""), "why_no_kernels": lambda _: ""}
    monkeypatch.setattr(runtime, "cuda", types.SimpleNamespace(**none | functions))


def pretend_tpus(monkeypatch) -> None:
    """Lowers global arrays as for TPUs, whose XLA cannot partition custom calls."""
    monkeypatch.setattr(lowering, "can_partition", lambda ctx: False)


def gpus_here() -> tuple[int, str]:
    """Returns the number of GPUs, also of those that JAX does not use; and if 0, the reason."""
    if runtime.cuda is None:
        return 0, runtime.cuda_reason
    found, reason = runtime.cuda.device_count()
    return found, f"no GPU is here: {reason}"


def wait_log() -> Any:
    """Returns a log of GPUs that wait, which takes the time as an argument."""
    return gpu_waits.WaitLog()


def num_exchanges_beside_programs() -> int:
    return runtime.cuda.num_exchanges_beside_programs() if runtime.cuda else 0


def heads_in_parts(is_cut: bool) -> Any:
    """Returns a patch: whether attention by a plan moves two parts of heads, as between GPUs."""
    return mock.patch.object(exchange_once, "moves_beside_work", lambda _: is_cut)


# ---- Processes.


def pretend(what: str, value: str) -> Any:
    """Returns a patch of what this process says of itself when it joins: "host" or "version"."""
    return mock.patch.object(processes, f"_{what}", lambda: value)


def leave_after(seconds: float) -> None:
    """Lets process 0 wait for others at its end no longer than this."""
    job._LONGEST_SECONDS = seconds


# ---- Attention.


def blocks_of(**sizes: int) -> Any:
    """Returns a patch that gives the passes of rings these sizes of blocks."""
    return mock.patch.object(ring, "rank_blocks", lambda *_, **__: sizes)


@contextlib.contextmanager
def interpreted_tpu_kernels():
    """Runs the kernels for TPUs on CPU devices, of what is traced inside; fails if any race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place of `races`
    from jax.experimental.pallas import tpu as pltpu

    from jax_cp_dispatch.attention.local import tpu

    passes = {"attend_blocks": tpu.attend_blocks, "block_gradients": tpu.block_gradients}
    interpreted = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True))
    with mock.patch.multiple(rotating, **passes), interpreted:
        yield
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
