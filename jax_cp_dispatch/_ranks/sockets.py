"""The sockets of a job: its processes meet at its start, and on one host give each other memory.

A message is one line of JSON.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_MAX_BYTES = 1 << 16  # of a message
_GREETING_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_SLICE_SECONDS = 0.2  # between checks whether another process has given up


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _send(connection: socket.socket, message: Any, *fds: int) -> None:
    line = (json.dumps(message) + "\n").encode()
    if fds:
        socket.send_fds(connection, [line], fds)
    else:
        connection.sendall(line)


def _receive(connection: socket.socket, seconds: float) -> Any:
    connection.settimeout(seconds)
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(_MAX_BYTES - len(line)) if len(line) < _MAX_BYTES else b""
        if not part:
            raise ConnectionError("it sent nothing that belongs to a job")
        line += part
    return json.loads(line)


def _accepted(
    listener: socket.socket, end: float, check: Callable[[], None] = lambda: None
) -> Iterator[socket.socket]:
    """Yields connections until `end`; calls `check` while it waits."""
    while time.monotonic() < end:
        check()
        listener.settimeout(min(_SLICE_SECONDS, _left(end)))
        with contextlib.suppress(TimeoutError):
            yield listener.accept()[0]


# ---- Lets a job's processes meet before JAX's coordination starts, to name a missing process.
#
# If a job is incomplete at its deadline, JAX ends the process without naming the missing one. JAX's
# service must also know from the start whether the loss of one process ends all others.


class JobMember(NamedTuple):
    """A process of the job, as described by itself."""

    process: int
    num_processes: int
    host: str  # equal for processes of one host
    host_name: str  # for messages


def meet(address: str, own: JobMember, timeout: float) -> bool:
    """Waits until all processes of the job have joined; returns whether all run on one host.

    Process 0 listens on the port of `address`. The port is free again when this returns.

    Raises:
      RuntimeError: a process did not join within `timeout` seconds, or two belong to different
        jobs. Raised in all processes that joined.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RuntimeError(
            f"initialize: coordinator_address is {address!r}; it needs to be host:port of process "
            "0, for example 10.0.0.1:1234."
        )
    if own.process == 0:
        wrong, is_one_host = _gather(address, int(port), own, timeout)
    else:
        wrong, is_one_host = _join((host.strip("[]"), int(port)), address, own, timeout)
    if wrong:
        raise RuntimeError(f"initialize: {wrong}")
    return is_one_host


def _gather(address: str, port: int, own: JobMember, timeout: float) -> tuple[str, bool]:
    members, wrong, end = [own], "", time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        connections = []
        accepted = _accepted(stack.enter_context(_listener(address, port)), end)
        while not wrong and len(members) < own.num_processes:
            connection = next(accepted, None)
            if connection is None:
                missing = set(range(own.num_processes)) - {member.process for member in members}
                names = ", ".join(f"process {process}" for process in sorted(missing))
                wrong = (
                    f"process 0 waited {timeout:g} s at {address} for {names} of "
                    f"{own.num_processes}, which did not join. Start every process of the job. "
                    "Check whether the missing one raised an error, and whether it can reach this "
                    "address."
                )
                break
            stack.enter_context(connection)
            try:
                process, num_processes, *hosts = _receive(connection, _GREETING_SECONDS)
                member = JobMember(int(process), int(num_processes), *map(str, hosts))
            except (OSError, ValueError, TypeError):
                connection.close()  # not a process of the job
                continue
            wrong = _why_not(member, members)
            connections.append(connection)
            members.append(member)
        is_one_host = all(member.host == own.host for member in members)
        for connection in connections:
            with contextlib.suppress(OSError):  # it has ended; JAX's coordination will report it
                _send(connection, [wrong, is_one_host])
    return wrong, is_one_host


def _listener(address: str, port: int) -> socket.socket:
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        if address.startswith("127."):
            return socket.create_server(("127.0.0.1", port))
        return socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as error:
        raise RuntimeError(
            f"initialize: process 0 cannot listen on port {port} of {address} ({error}). Choose "
            "a free port."
        ) from error


def _why_not(member: JobMember, members: list[JobMember]) -> str:
    num_processes = members[0].num_processes
    if member.num_processes != num_processes or not 0 < member.process < num_processes:
        return (
            f"process {member.process} of {member.num_processes} on host {member.host_name} joined "
            f"a job of {num_processes} processes. Pass the same num_processes in all of them, "
            "and process_id from 0."
        )
    for other in members:
        if member.process == other.process:
            return (
                f"two processes, on hosts {other.host_name} and {member.host_name}, joined as "
                f"process {member.process}. Pass a different process_id in each."
            )
    return ""


def _join(place: tuple[str, int], address: str, own: JobMember, timeout: float) -> tuple[str, bool]:
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection(place, timeout=_left(end)) as connection:
                _send(connection, own)
                # Process 0 may have just joined.
                wrong, is_one_host = _receive(connection, timeout + _GREETING_SECONDS)
                return str(wrong), bool(is_one_host)
        except (OSError, ValueError, TypeError) as error:  # not up yet, or not ours
            if time.monotonic() > end:
                why = error if isinstance(error, OSError) else "another program answers there"
                raise RuntimeError(
                    f"initialize: process {own.process} waited {timeout:g} s for process 0 at "
                    f"{address} ({why}). Start process 0. Check whether it raised an error, and "
                    "whether this host can reach the address."
                ) from error
            time.sleep(_RETRY_SECONDS)


# ---- Connects the processes of a job on one host by checked sockets, and makes their segments.

SEGMENT_BYTES = "JAX_CP_DISPATCH_SEGMENT_BYTES"
_DEFAULT_BYTES = 256 << 30  # address space; memory is only allocated where rows are written
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Segment(NamedTuple):
    """Memory of one process that the others of its job read."""

    fd: int
    num_bytes: int


def make_segment() -> Segment:
    """Creates a segment, whose address space is that of the environment or the default.

    It has no name in any file system, so the system frees it when the last process that maps it
    ends, whatever the cause. Its size is sealed: once checked, it cannot change.
    """
    text = os.environ.get(SEGMENT_BYTES, str(_DEFAULT_BYTES))
    if not text.isdigit() or not 0 < int(text) < 1 << 46:
        raise ValueError(
            f"initialize: {SEGMENT_BYTES} is {text!r}; it needs to be a number of bytes of "
            "address space, below 2**46."
        )
    name = f"jax_cp_dispatch-{secrets.token_hex(8)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, int(text))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return Segment(fd, int(text))


def check_segment(process: int, segment: Segment) -> None:
    """Rejects a segment of another process whose properties are not as announced."""
    status = os.fstat(segment.fd)
    seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)
    found = (status.st_uid, stat.S_IMODE(status.st_mode), status.st_size, seals & _SEALS)
    needed = (os.getuid(), 0o600, segment.num_bytes, _SEALS)
    if found != needed:
        raise PermissionError(
            f"process {process} sent a segment with (user, mode, bytes, seals) {found}; it needs "
            f"to be {needed}"
        )


def listen() -> tuple[socket.socket, str]:
    """Opens a socket for the other processes; returns it and its name, which cannot be guessed.

    The name is not in the file system, so nothing is left behind. The system identifies the peer of
    a connection.
    """
    name = f"jax_cp_dispatch-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(128)
    return listener, name


class ProcessInfo(NamedTuple):
    """The first message of every process to all others."""

    version: str  # of everything that must agree
    host: str
    host_name: str  # for messages
    address: str  # that its host's name resolves to on that host; "": none
    user: int
    pid: int
    socket_name: str
    token: str  # which a process shows that connects to it
    failure: str  # why it cannot share memory; "": it can


class Neighbour(NamedTuple):
    """A connected process. The extension reads the fields by name."""

    process: int
    pid: int
    socket_fd: int
    pid_fd: int  # -1: the system provides none
    segment_fd: int
    segment_bytes: int


def connect_all(
    listener: socket.socket,
    process: int,
    peers: Mapping[int, ProcessInfo],
    segment: Segment,
    timeout: float,
    check_others: Callable[[], None] = lambda: None,
) -> list[Neighbour]:
    """Connects to the processes before this one of `peers`, and waits for those after it.

    `check_others` is called while waiting, and raises OSError when another process has given up.
    This raises OSError if a process cannot be reached within `timeout` seconds, or belongs to
    another user.
    """
    end = time.monotonic() + timeout
    connections: dict[int, socket.socket] = {}
    try:
        for other in sorted(other for other in peers if other < process):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections[other] = connection
            connection.settimeout(_left(end))
            connection.connect("\0" + peers[other].socket_name)
            _check_user(connection, other)
            _send(connection, [process, peers[other].token])
        accepted = _accepted(listener, end, check_others)
        while len(connections) < len(peers) - 1:
            connection = next(accepted, None)
            if connection is None:
                missing = sorted(peers.keys() - connections.keys() - {process})
                raise TimeoutError(f"processes {missing} did not connect in {timeout:g} s")
            other = _greeted_by(connection, peers[process].token, end)
            if other in peers and other not in connections and other > process:
                connections[other] = connection
            else:
                connection.close()  # not a process of the job
        return [
            _exchange_segments(connections[other], other, segment, end)
            for other in sorted(connections)
        ]
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise


def _check_user(connection: socket.socket, other: int | str) -> int:
    """Requires a process of this user, as known to the system; returns its id."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = struct.unpack("3i", peer)
    if user != os.getuid():
        raise PermissionError(f"process {other} belongs to user {user}, this one to {os.getuid()}")
    return pid


def _greeted_by(connection: socket.socket, token: str, end: float) -> Any:
    """Returns the process at the other end if it is of this user and knows the token."""
    try:
        _check_user(connection, "?")
        other, shown = _receive(connection, min(_GREETING_SECONDS, _left(end)))
        return int(other) if secrets.compare_digest(str(shown), token) else None
    except (OSError, ValueError, TypeError):
        return None


def _exchange_segments(
    connection: socket.socket, other: int, segment: Segment, end: float
) -> Neighbour:
    connection.settimeout(_left(end))
    _send(connection, segment.num_bytes, segment.fd)
    message, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
    if len(fds) != 1:
        raise ConnectionError(f"process {other} closed the connection before its segment came")
    os.set_inheritable(fds[0], False)
    theirs = Segment(fds[0], int(json.loads(message)))
    check_segment(other, theirs)
    pid = _check_user(connection, other)
    try:
        pid_fd = os.pidfd_open(pid)
    except OSError:  # old kernel or other namespace: the socket's end of file shows the exit too
        pid_fd = -1
    connection.setblocking(False)
    return Neighbour(other, pid, connection.detach(), pid_fd, *theirs)
