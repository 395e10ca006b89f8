"""Finds and connects the processes of a job that share memory: those of one host and user."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.job import (
    coordinator_host,
    publish,
    publish_and_read_all,
    read_published,
)
from jax_cp_dispatch._ranks.processes.connect import ConnectionInfo, Segment, connect_all
from jax_cp_dispatch._ranks.processes.ending import watch_process

_OP, _FAILURE = "initialize", "failure"
_MARGIN_SECONDS = 30.0  # for the last process to learn that connecting took too long


class ProcessInfo(NamedTuple):
    """The first message of every process to all others."""

    version: str  # of everything that must agree
    host: str
    host_name: str  # for messages
    address: str  # that its host's name resolves to on that host; "": none
    user: int
    pid: int
    socket_name: str
    token: str
    failure: str  # why it cannot share memory; "": it can


class _GaveUp(ConnectionError):
    """Another process has reported that it cannot share memory, and why."""


def find_shared_memory_groups(others: Sequence[ProcessInfo]) -> list[int]:
    """Returns a number for each process, equal for processes of one host and user."""
    owners = [(other.host, other.user) for other in others]
    return [owners.index(owner) for owner in owners]


def connect_group(
    process: int,
    members: Mapping[int, ProcessInfo],
    listener: socket.socket,
    segment: Segment,
    timeout: float,
) -> str:
    """Starts shared memory between the processes of each group, in the whole job or nowhere.

    If processes chose differently, some would wait for others. A process that fails reports it at
    once, and then no process waits any longer.

    Returns:
      "" if it has started, else the reason why not, the same in all processes.
    """
    peers = {p: ConnectionInfo(info.socket_name, info.token) for p, info in members.items()}
    failure = ""
    try:
        _start(process, peers, listener, segment, timeout)
    except _GaveUp as error:
        failure = str(error)
    except (OSError, ValueError) as error:
        failure = f"process {process} cannot share memory with the others: {error}"
        publish(_OP, _FAILURE, failure)
    failures = publish_and_read_all(_OP, "shared_memory", failure, timeout + _MARGIN_SECONDS)
    return next(filter(None, failures), "")


def _start(
    process: int,
    peers: Mapping[int, ConnectionInfo],
    listener: socket.socket,
    segment: Segment,
    timeout: float,
) -> None:
    def check_others():
        for text in read_published(_OP, _FAILURE).values():
            raise _GaveUp(text)

    neighbours = connect_all(listener, process, peers, segment, timeout, check_others)
    for neighbour in neighbours:
        watch_process(neighbour.process, neighbour.pid_fd)
    runtime.native.start_shared_memory(
        process, segment_fd=segment.fd, segment_bytes=segment.num_bytes, others=neighbours
    )


def own_address() -> str:
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


def check_addresses(others: Sequence[ProcessInfo]) -> None:
    """Rejects hosts whose names resolve to no address that other hosts reach.

    Raises:
      RuntimeError: there is such a host; gloo would fail in the first collective.
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
