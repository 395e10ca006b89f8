"""Between CPU devices: inside one process, and between the processes of one host."""

import functools
from collections.abc import Sequence

import jax

from jax_cp_dispatch._ranks.call_site import call_site_attributes
from jax_cp_dispatch._ranks.communicator import Groups
from jax_cp_dispatch._ranks.implementations.implementation import (
    Implementation,
    all_groups,
    process_numbers,
    why_not_one_process,
)
from jax_cp_dispatch._ranks.processes import share_memory, transport_choice

_REMEDY = (
    "Pass implementation='xla', or run on CPU devices with JAX_PLATFORMS=cpu: for virtual devices "
    "of one process, set jax.config.update('jax_num_cpu_devices', n); for several processes of one "
    "host, call jax_cp_dispatch.initialize()."
)


def _why_not_in_process(platforms: Sequence[str], groups: Groups | None) -> str | None:
    return _why_not_cpu(platforms) or why_not_one_process(groups)


def _why_not_shared_memory(platforms: Sequence[str], groups: Groups | None) -> str | None:
    missing = _why_not_cpu(platforms)
    if missing is not None:
        return missing
    if jax.process_count() == 1:
        return "there is one process"
    choice = transport_choice()
    if choice is None:
        return "jax_cp_dispatch.initialize() has not been called in this process"
    found = map(process_numbers, all_groups(groups))
    return None if all(map(share_memory, found)) else choice.reason


def _why_not_cpu(platforms: Sequence[str]) -> str | None:
    other = [name for name in platforms if name != "cpu"]
    return f"the platform is {other[0]!r}, but it serves CPU devices" if other else None


def _why_shared_memory() -> str:
    choice = transport_choice()
    return choice.reason if choice else ""


IN_PROCESS = Implementation(
    name="in_process",
    platform="cpu",
    spans_processes=False,
    why_not=_why_not_in_process,
    serves=lambda: "all devices are CPU devices of this process",
    remedy=_REMEDY,
    rank_attributes=functools.partial(call_site_attributes, "in_process"),
)

SHARED_MEMORY = Implementation(
    name="shared_memory",
    platform="cpu",
    spans_processes=True,
    why_not=_why_not_shared_memory,
    serves=_why_shared_memory,
    remedy=_REMEDY,
    rank_attributes=functools.partial(call_site_attributes, "shared_memory"),
)

ON_CPU = (IN_PROCESS, SHARED_MEMORY)
