"""Starts the transport between the processes of a job; reports the choice and the reason."""

import hashlib
import ipaddress
import os
import pathlib
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from jax_cp_dispatch._jax_private import COMPILATION_EVENT
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu import connect_gpus
from jax_cp_dispatch._ranks.job import (
    coordinator_host,
    is_in_job,
    join,
    place_in_job,
    publish,
    publish_and_read_all,
    read_published,
    watch_process,
)
from jax_cp_dispatch._ranks.sockets import ProcessInfo, Segment, connect_all, listen, make_segment
from jax_cp_dispatch.cpu_devices import keep_freed_memory

# ---- Marks where the compilation of one program ends and that of the next begins.
#
# Processes match the calls of a program by their order in it. XLA reports each call to the
# extension, on a thread of its own, but not its program. So this process compiles one program at a
# time.

_LONGEST = 600.0  # seconds; then two programs are compiled at once, and their ranks may not meet
_one_at_a_time = threading.RLock()
_held = threading.local()  # `depth`: how often this thread holds the lock


def _watch_programs() -> None:
    """Starts listening to JAX's events, and makes JAX compile every program.

    JAX numbers the executions of a program from its fingerprint. A program read from the cache on
    disk has a different fingerprint than the same program compiled by another process.
    """
    jax.monitoring.register_scalar_listener(_on_begin)
    jax.monitoring.register_event_duration_secs_listener(_on_end)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it may be initialized already


def _on_begin(event: str, value: float, **_: str | int) -> None:
    if event == COMPILATION_EVENT and _one_at_a_time.acquire(timeout=_LONGEST):
        _held.depth = getattr(_held, "depth", 0) + 1


def _on_end(event: str, duration_secs: float, **_: str | int) -> None:
    if event != COMPILATION_EVENT:
        return
    runtime.native.end_programs()
    if getattr(_held, "depth", 0):
        _held.depth -= 1
        _one_at_a_time.release()


# ---- Connects the processes of a job that share memory: those of one host and user.

_OP, _FAILURE = "initialize", "failure"
_MARGIN_SECONDS = 30.0  # for the last process to learn that connecting took too long


class _GaveUp(ConnectionError):
    """Another process has reported that it cannot share memory, and why."""


def _connect_group(
    process: int,
    peers: Mapping[int, ProcessInfo],
    listener: socket.socket,
    segment: Segment,
    timeout: float,
) -> str:
    """Starts shared memory between the processes of each group, in the whole job or nowhere.

    If processes chose differently, some would wait for others. A process that fails reports it at
    once, and then no process waits any longer. Returns "", or why it has not started, the same in
    all processes.
    """

    def check_others():
        for text in read_published(_OP, _FAILURE).values():
            raise _GaveUp(text)

    failure = ""
    try:
        neighbours = connect_all(listener, process, peers, segment, timeout, check_others)
        for neighbour in neighbours:
            watch_process(neighbour.process, neighbour.pid_fd)
        runtime.native.start_shared_memory(
            process, segment_fd=segment.fd, segment_bytes=segment.num_bytes, others=neighbours
        )
    except _GaveUp as error:
        failure = str(error)
    except (OSError, ValueError) as error:
        failure = _why_unshared(process, error)
        publish(_OP, _FAILURE, failure)
    failures = publish_and_read_all(_OP, "shared_memory", failure, timeout + _MARGIN_SECONDS)
    return next(filter(None, failures), "")


def _why_unshared(process: int, error: Exception) -> str:
    return f"process {process} cannot share memory with the others: {error}"


def _own_address() -> str:
    """Returns the address at which gloo (XLA's collectives on CPU) will listen; "" if none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return str(address[0])
    return ""


def _check_addresses(others: Sequence[ProcessInfo]) -> None:
    """Rejects hosts whose names resolve to no address that other hosts reach.

    On such a host, gloo would fail in the first collective.
    """
    collectives = jax.config.values["jax_cpu_collectives_implementation"]
    if collectives != "gloo" or len({other.host for other in others}) == 1:
        return
    if _is_loopback(coordinator_host()):  # all processes run on one host
        return
    for process, other in enumerate(others):
        if not other.address or _is_loopback(other.address):
            found = other.address or "no address of its own"
            raise RuntimeError(
                f"initialize: process {process} runs on host {other.host_name}, whose name "
                f"resolves to {found} there. XLA's collectives (gloo) need an address that the "
                "other hosts can reach. Map the name to such an address, in /etc/hosts or DNS."
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


class TransportChoice(NamedTuple):
    """The transport between the processes of a job, and the reason.

    Attributes:
      implementation: for ranks on all devices. "shared_memory"; on GPUs "nvshmem" or "cuda_ipc";
        "xla" if no transport of this package reaches all of them; "in_process" for one process.
      reason: why it was chosen, as text.
    """

    implementation: str
    reason: str


_choice: TransportChoice | None = None
_memory_groups: tuple[int, ...] = ()


def transport_choice() -> TransportChoice | None:
    """Returns the choice of `initialize`, or None before that call."""
    return _choice


def share_memory(processes: Iterable[int]) -> bool:
    """Whether these processes exchange through shared memory; the same answer in all of them."""
    return bool(_memory_groups) and len({_memory_groups[process] for process in processes}) <= 1


def num_cpu_devices_here() -> int:
    """Returns the number of CPU devices that share this host's cores, as known to `initialize`."""
    own, devices = jax.process_index(), jax.devices("cpu")
    near = sum(share_memory((own, device.process_index)) for device in devices)
    return max(near, jax.local_device_count("cpu"))


def _remember(choice: TransportChoice, memory_groups: Sequence[int] = ()) -> TransportChoice:
    """Stores a choice. Processes with equal `memory_groups` share memory; if empty, none do."""
    global _choice, _memory_groups
    _choice, _memory_groups = choice, tuple(memory_groups)
    return choice


_BY_XLA = "XLA's collectives move rows between them"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 120.0,
) -> TransportChoice:
    """Connects this process to the others of its job, so that exchanges reach their ranks.

    Call once in every process before JAX is used: instead of `jax.distributed.initialize`, or after
    it. Without arguments it uses the settings of `python -m jax_cp_dispatch.launch`; outside a job
    it does nothing. Processes of one host and one user use shared memory. In a job over several
    hosts, groups of ranks inside one host share memory too; XLA's collectives move rows between
    hosts (`implementation="xla"`). For processes with GPUs, `gpu.connect_gpus` chooses.

    If `initialize` starts JAX's coordination, it also selects gloo for collectives on CPU, and
    process 0 waits at its end for processes that are still running. On one host it sets
    `jax_enable_recoverability`, so that JAX does not end this process when another one is lost;
    over several hosts JAX's watchdog ends it. With shared memory, JAX's compilation cache on disk
    is turned off: a program from the cache would not match one that another process compiled.

    Args:
      coordinator_address, num_processes, process_id: as in `jax.distributed.initialize`.
      timeout: seconds to wait for each of the other processes.
    Returns:
      The implementation for programs with ranks on all devices, and the reason.
    Raises:
      RuntimeError: another process did not join or runs another version, or a host's name resolves
        to no address that other hosts reach. Raised in all processes. Or this process may open too
        few files.
      ValueError: the environment variable `JAX_CP_DISPATCH_SEGMENT_BYTES` is not a number of bytes.
    """
    known = transport_choice()
    if known is not None and known.implementation != "in_process":
        return known
    given = coordinator_address, num_processes, process_id
    if not is_in_job() and not join(*given, _host(), timeout):
        return _remember(TransportChoice("in_process", "this process belongs to no job of several"))
    process, count = place_in_job()
    if count == 1:
        return _remember(TransportChoice("in_process", "the job has one process"))
    is_cpu = getattr(jax.config, "jax_platforms", None) == "cpu"  # known before JAX has started
    if not is_cpu and jax.default_backend() == "gpu":
        return _remember(TransportChoice(*connect_gpus(timeout=timeout)))
    return _choose(process, timeout)


def _choose(process: int, timeout: float) -> TransportChoice:
    listener, socket_name = listen()
    with listener:
        segment, failure = None, ""
        try:
            segment = make_segment()
        except OSError as error:
            failure = _why_unshared(process, error)
        own = ProcessInfo(
            _version(), _host(), socket.gethostname(), _own_address(), os.getuid(), os.getpid(),
            socket_name, secrets.token_hex(32), failure,
        )  # fmt: skip
        heard = publish_and_read_all(_OP, "process_info", own, timeout)
        others = [ProcessInfo(*fields) for fields in heard]
        for other, info in enumerate(others):
            if info.version != others[0].version:
                raise RuntimeError(
                    f"initialize: process {other} (pid {info.pid} on {info.host_name}) "
                    "runs another program version. Expected, as in process 0: "
                    f"{others[0].version}. Seen: {info.version}. Install the same versions for "
                    "all processes."
                )
        _check_addresses(others)
        owners = [(other.host, other.user) for other in others]
        memory_groups = [owners.index(owner) for owner in owners]
        failure = next((other.failure for other in others if other.failure), "")
        is_connected = not failure and len(set(memory_groups)) < len(others)
        if segment is not None and is_connected:
            peers = {p: other for p, other in enumerate(others) if owners[p] == owners[process]}
            failure = _connect_group(process, peers, listener, segment, timeout)
        elif segment is not None:
            os.close(segment.fd)
    reason = "; ".join(filter(None, (_why_several(others), failure)))
    if failure or not is_connected:
        return _remember(TransportChoice("xla", f"{reason}; {_BY_XLA}"))
    _watch_programs()
    keep_freed_memory()  # fresh pages would make every receive several times slower
    if reason:
        inside = "groups of ranks inside one host share memory"
        return _remember(TransportChoice("xla", f"{reason}; {_BY_XLA}; {inside}"), memory_groups)
    reason = (
        f"the {len(others)} processes of the job run on host {own.host_name} as user {own.user}"
    )
    return _remember(TransportChoice("shared_memory", reason), memory_groups)


def _version() -> str:
    extension = pathlib.Path(str(runtime.native.__file__)).read_bytes()
    return (
        f"jax_cp_dispatch, build {hashlib.sha256(extension).hexdigest()[:12]}; "
        f"jax {jax.__version__}"
    )


def _host() -> str:
    """Returns an id that is equal for processes that can share memory.

    It names the boot and the network namespace, to which the names of sockets belong.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _why_several(others: list[ProcessInfo]) -> str | None:
    first = others[0]
    for other, info in enumerate(others):
        if info.host != first.host:
            return (
                f"process {other} runs on host {info.host_name}, process 0 on host "
                f"{first.host_name} (or in another container); only processes of one host share "
                "memory"
            )
        if info.user != first.user:
            return (
                f"process {other} runs as user {info.user}, process 0 as user "
                f"{first.user}, and only processes of one user share memory"
            )
    return None
