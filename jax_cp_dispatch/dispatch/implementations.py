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

    Call outside of `jit`; starts the default backend.
    """
    missing = _what_in_process_lacks([jax.default_backend()])
    return {
        "in_process": Implementation(
            missing is None,
            missing or "all devices are CPU devices of this process",
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

    Raises:
      ValueError: `wanted` is no implementation.
      NotImplementedError: `wanted` cannot serve these platforms.
    """
    if wanted in GPU_IMPLEMENTATIONS or (wanted is None and set(platforms) == {"cuda"}):
        return _choose_for_gpus(op, wanted, platforms)
    missing = _what_in_process_lacks(platforms)
    if wanted is None:
        if missing is None:
            return "in_process"
        _say_once(f"{op}: moves rows with XLA's collectives (implementation='xla'): {missing}.")
        return "xla"
    if wanted == "in_process" and missing is not None:
        raise NotImplementedError(
            f"{op}: implementation='in_process' cannot serve this program: {missing}. Pass "
            "implementation='xla', or run on virtual CPU devices: JAX_PLATFORMS=cpu and "
            "jax.config.update('jax_num_cpu_devices', n)."
        )
    return wanted


def check_implementation(op: str, wanted: str | None) -> None:
    """Refuses a name that is none, and any where nothing can run."""
    refuse_after_fork(op)
    if wanted not in (None, "in_process", "xla", *GPU_IMPLEMENTATIONS):
        raise ValueError(
            f"{op}: implementation is {wanted!r}; there are 'in_process' and 'xla', on GPUs "
            f"{', '.join(map(repr, GPU_IMPLEMENTATIONS))}, and None chooses. See "
            "available_implementations()."
        )


def in_process_serves(platform: str) -> bool:
    """Whether programs that are lowered for `platform` can use this package's transport."""
    return _what_in_process_lacks([platform]) is None


def _what_in_process_lacks(platforms: Sequence[str]) -> str | None:
    other = [name for name in platforms if name != "cpu"]
    if other:
        return f"the platform is {other[0]!r}, and it serves CPU devices"
    if jax.process_count() > 1:
        return f"there are {jax.process_count()} processes, and it serves the devices of one"
    return None


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
        _say_once(f"{op}: moves rows with XLA's collectives (implementation='xla'): {reason}.")
    return name or "xla"


@functools.lru_cache(maxsize=16)
def _say_once(message: str) -> None:
    warnings.warn(f"jax_cp_dispatch: {message}", UserWarning, stacklevel=2)
