"""Which implementations of the primitives there are, and which one a program gets."""

import functools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jax_cp_dispatch.fork import refuse_after_fork
from jax_cp_dispatch.gpu import (
    GPU_IMPLEMENTATIONS,
    choose_gpu_implementation,
    what_gpu_lacks,
)
from jax_cp_dispatch.processes import transport_choice


class Implementation(NamedTuple):
    """One way to move rows, and whether it can be used here.

    Attributes:
      available: whether `implementation=<its name>` works on the default backend.
      reason: why, or why not.
    """

    available: bool
    reason: str


def available_implementations() -> dict[str, Implementation]:
    """Returns the implementations by the name that `implementation=` takes, preferred ones first.

    Call outside of `jit`, after `initialize` where there are several processes; starts the default
    backend.
    """
    platforms = [jax.default_backend()]
    found = {name: lacks(platforms) for name, lacks in _LACKS.items()}
    choice = transport_choice()
    return {
        "in_process": Implementation(
            found["in_process"] is None,
            found["in_process"] or "all devices are CPU devices of this process",
        ),
        "shared_memory": Implementation(
            found["shared_memory"] is None,
            found["shared_memory"] or (choice.reason if choice else ""),
        ),
        **{name: _gpu_implementation(name) for name in GPU_IMPLEMENTATIONS},
        "xla": Implementation(
            True,
            "XLA's all-gather and local gathers, on every platform; a rank holds all ranks' rows, "
            "and a plan that does not fit gives NaN, not an error",
        ),
    }


def choose_implementation(op: str, wanted: str | None, platforms: Sequence[str]) -> str:
    """The implementation of a program that is lowered for `platforms`.

    Args:
      op: begins the message of an error.
      wanted: what the caller asked for; None chooses.
    Raises:
      ValueError: `wanted` is no implementation.
      NotImplementedError: `wanted` cannot serve these platforms.
    """
    if wanted in GPU_IMPLEMENTATIONS or (wanted is None and set(platforms) == {"cuda"}):
        return _choose_for_gpus(op, wanted, platforms)
    lacks = {name: lacks(platforms) for name, lacks in _LACKS.items()}
    if wanted is None:
        for name, missing in lacks.items():
            if missing is None:
                return name
        say_once(f"{op}: moves rows with XLA's collectives (implementation='xla'): {_why(lacks)}.")
        return "xla"
    missing = lacks.get(wanted)
    if missing is not None:
        raise NotImplementedError(
            f"{op}: implementation={wanted!r} cannot serve this program: {missing}. Pass "
            "implementation='xla', or run on CPU devices: JAX_PLATFORMS=cpu, with "
            "jax.config.update('jax_num_cpu_devices', n) for virtual ones of one process, or "
            "jax_cp_dispatch.initialize() in several."
        )
    return wanted


def fall_back_to_xla(op: str, wanted: str | None, missing: str) -> str:
    """ "xla", where a GPU transport could serve but its kernels lack something; said once.

    Raises:
      NotImplementedError: the transport was asked for by its name.
    """
    if wanted is not None:
        raise NotImplementedError(
            f"{op}: implementation={wanted!r} cannot serve this program: {missing}. Pass "
            "implementation='xla'."
        )
    say_once(f"{op}: XLA's products and collectives (implementation='xla'): {missing}.")
    return "xla"


def check_implementation(op: str, wanted: str | None) -> None:
    """Refuses a name that is none, and any where nothing can run."""
    refuse_after_fork(op)
    if wanted not in (None, *_LACKS, "xla", *GPU_IMPLEMENTATIONS):
        raise ValueError(
            f"{op}: implementation is {wanted!r}; there are 'in_process', 'shared_memory' and "
            f"'xla', on GPUs {', '.join(map(repr, GPU_IMPLEMENTATIONS))}, and None chooses. See "
            "available_implementations()."
        )


def transport_serves(platform: str) -> bool:
    """Whether programs that are lowered for `platform` can use a transport of this package."""
    return any(lacks([platform]) is None for lacks in _LACKS.values())


def _what_in_process_lacks(platforms: Sequence[str]) -> str | None:
    missing = _what_cpu_lacks(platforms)
    if missing is None and jax.process_count() > 1:
        return f"there are {jax.process_count()} processes, and it serves the devices of one"
    return missing


def _what_shared_memory_lacks(platforms: Sequence[str]) -> str | None:
    missing = _what_cpu_lacks(platforms)
    if missing is not None:
        return missing
    if jax.process_count() == 1:
        return "there is one process"
    choice = transport_choice()
    if choice is None:
        return "jax_cp_dispatch.initialize() has not been called in this process"
    return None if choice.implementation == "shared_memory" else choice.reason


def _what_cpu_lacks(platforms: Sequence[str]) -> str | None:
    other = [name for name in platforms if name != "cpu"]
    return f"the platform is {other[0]!r}, and it serves CPU devices" if other else None


_LACKS = {"in_process": _what_in_process_lacks, "shared_memory": _what_shared_memory_lacks}


def _why(lacks: dict[str, str | None]) -> str:
    """The reason that says most: of several processes, why they do not share memory."""
    return str(lacks["shared_memory" if jax.process_count() > 1 else "in_process"])


def _gpu_implementation(name: str) -> Implementation:
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    missing = what_gpu_lacks(name, [platform])
    return Implementation(missing is None, missing or GPU_IMPLEMENTATIONS[name])


def _choose_for_gpus(op: str, wanted: str | None, platforms: Sequence[str]) -> str:
    if wanted is not None:
        missing = what_gpu_lacks(wanted, platforms)
        if missing is not None:
            raise NotImplementedError(
                f"{op}: implementation={wanted!r} cannot serve this program: {missing}. Pass "
                "implementation='xla'."
            )
        return wanted
    name, reason = choose_gpu_implementation(platforms)
    if name is None:
        say_once(f"{op}: moves rows with XLA's collectives (implementation='xla'): {reason}.")
    return name or "xla"


@functools.lru_cache(maxsize=16)
def say_once(message: str) -> None:
    warnings.warn(f"jax_cp_dispatch: {message}", UserWarning, stacklevel=2)
