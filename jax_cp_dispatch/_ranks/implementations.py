"""Lists the implementations of the primitives and chooses one for a program."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jax_cp_dispatch._ranks.call_site import Groups
from jax_cp_dispatch._ranks.fork import refuse_after_fork
from jax_cp_dispatch._ranks.gpu import (
    GPU_IMPLEMENTATIONS,
    choose_gpu_implementation,
    what_gpu_lacks,
)
from jax_cp_dispatch._ranks.processes import refuse_alone, share_memory, transport_choice
from jax_cp_dispatch._warning import warn_caller


class Implementation(NamedTuple):
    """A way to move rows, and whether it is available here.

    Attributes:
      available: whether `implementation=<its name>` works on the default backend, for ranks on all
        devices. It may still serve groups of ranks inside one process or host if this is false.
      reason: why it is available, or why not.
    """

    available: bool
    reason: str


def available_implementations() -> dict[str, Implementation]:
    """Returns the implementations by name (the values of `implementation=`), preferred ones first.

    Call outside `jit`; with several processes, call after `initialize`. Starts the default backend.
    """
    platforms = [jax.default_backend()]
    found = {name: lacks(platforms, None) for name, lacks in _LACKS.items()}
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
            "XLA's collectives, on every platform; a rank may hold all ranks' rows, and a plan "
            "that does not fit gives NaN, not an error",
        ),
    }


def choose_implementation(
    op: str, wanted: str | None, platforms: Sequence[str], groups: Groups | None = None
) -> str:
    """Returns the implementation for a program lowered for `platforms`, the same in all processes.

    Args:
      op: the public operation, for error messages.
      wanted: the caller's choice; None selects one.
      groups: the processes of the ranks, by group; None if all devices form one group.
    Raises:
      ValueError: `wanted` is not an implementation.
      NotImplementedError: `wanted` cannot serve these platforms or groups.
    """
    if wanted in GPU_IMPLEMENTATIONS or (wanted is None and set(platforms) == {"cuda"}):
        return _choose_for_gpus(op, wanted, platforms)
    lacks = {name: lacks(platforms, groups) for name, lacks in _LACKS.items()}
    if wanted is None:
        for name, missing in lacks.items():
            if missing is None:
                return name
        say_once(f"moves rows with XLA's collectives (implementation='xla'): {_why(lacks)}.")
        return "xla"
    _refuse(op, wanted, lacks.get(wanted))
    return wanted


def check_groups(op: str, wanted: str | None, groups: Groups | None) -> None:
    """Rejects, before lowering, a transport between CPU devices that does not reach all ranks.

    Raises:
      NotImplementedError: `wanted` cannot serve groups of these processes.
    """
    if groups is not None and wanted in _LACKS:
        _refuse(op, wanted, _LACKS[wanted](["cpu"], groups))


def _refuse(op: str, wanted: str, missing: str | None) -> None:
    if missing is not None:
        raise NotImplementedError(
            f"{op}: implementation={wanted!r} cannot serve this program: {missing}. Pass "
            "implementation='xla', or run on CPU devices: JAX_PLATFORMS=cpu, with "
            "jax.config.update('jax_num_cpu_devices', n) for virtual ones of one process, or "
            "jax_cp_dispatch.initialize() in several of one host."
        )


def fall_back_to_xla(op: str, wanted: str | None, missing: str) -> str:
    """Returns "xla" where the kernels of a GPU transport do not support a call; logs this once.

    Raises:
      NotImplementedError: the caller asked for the transport by name.
    """
    if wanted is not None:
        raise NotImplementedError(
            f"{op}: implementation={wanted!r} cannot serve this program: {missing}. Pass "
            "implementation='xla'."
        )
    say_once(f"{op}: XLA's products and collectives (implementation='xla'): {missing}.")
    return "xla"


def check_implementation(op: str, wanted: str | None) -> None:
    """Rejects an unknown implementation, and every call in a forked or an unconnected process."""
    refuse_after_fork(op)
    refuse_alone(op)
    if wanted not in (None, *_LACKS, "xla", *GPU_IMPLEMENTATIONS):
        raise ValueError(
            f"{op}: implementation is {wanted!r}; there are 'in_process', 'shared_memory' and "
            f"'xla', on GPUs {', '.join(map(repr, GPU_IMPLEMENTATIONS))}, and None chooses. See "
            "available_implementations()."
        )


def num_cpu_devices_here() -> int:
    """Returns the number of CPU devices that share this host's cores, as known to `initialize`."""
    own, devices = jax.process_index(), jax.devices("cpu")
    near = sum(share_memory((own, device.process_index)) for device in devices)
    return max(near, jax.local_device_count("cpu"))


def _what_in_process_lacks(platforms: Sequence[str], groups: Groups | None) -> str | None:
    missing = _what_cpu_lacks(platforms)
    if missing is not None or jax.process_count() == 1:
        return missing
    for group in _all_groups(groups):
        if len(set(group)) > 1:
            processes = ", ".join(map(str, sorted(set(group))[:4]))
            return (
                f"ranks of one group are in {len(set(group))} processes ({processes}"
                f"{', ...' if len(set(group)) > 4 else ''}), and it serves the devices of one"
            )
    return None


def _what_shared_memory_lacks(platforms: Sequence[str], groups: Groups | None) -> str | None:
    missing = _what_cpu_lacks(platforms)
    if missing is not None:
        return missing
    if jax.process_count() == 1:
        return "there is one process"
    choice = transport_choice()
    if choice is None:
        return "jax_cp_dispatch.initialize() has not been called in this process"
    return None if all(map(share_memory, _all_groups(groups))) else choice.reason


def _all_groups(groups: Groups | None) -> Groups:
    return (tuple(range(jax.process_count())),) if groups is None else groups


def _what_cpu_lacks(platforms: Sequence[str]) -> str | None:
    other = [name for name in platforms if name != "cpu"]
    return f"the platform is {other[0]!r}, and it serves CPU devices" if other else None


_LACKS = {"in_process": _what_in_process_lacks, "shared_memory": _what_shared_memory_lacks}


def _why(lacks: dict[str, str | None]) -> str:
    """Returns the most informative reason: with several processes, why they do not share memory."""
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
        say_once(f"moves rows with XLA's collectives (implementation='xla'): {reason}.")
    return name or "xla"


@functools.lru_cache(maxsize=16)
def say_once(message: str) -> None:
    warn_caller(f"jax_cp_dispatch: {message}")
