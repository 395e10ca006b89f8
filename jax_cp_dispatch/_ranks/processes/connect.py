"""Connects the processes of a job on one host by checked sockets, and makes their segments."""

import fcntl
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

SEGMENT_BYTES = "JAX_CP_DISPATCH_SEGMENT_BYTES"


# Address space. Memory is only allocated where rows are written.
_DEFAULT_BYTES = 256 << 30


_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Segment(NamedTuple):
    """Memory of one process that the others of its job read."""

    fd: int
    num_bytes: int


def make_segment() -> Segment:
    """Creates a segment.

    It has no name in any file system, so the system frees it when the last process that maps it
    ends, whatever the cause. Its size is sealed: once checked, it cannot change.
    """
    num_bytes = segment_bytes()
    fd = os.memfd_create(
        f"jax_cp_dispatch-{secrets.token_hex(8)}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    )
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return Segment(fd, num_bytes)


def segment_bytes() -> int:
    """Returns the address space of one segment, from the environment or the default."""
    text = os.environ.get(SEGMENT_BYTES, str(_DEFAULT_BYTES))
    if not text.isdigit() or not 0 < int(text) < 1 << 46:
        raise ValueError(
            f"initialize: {SEGMENT_BYTES} is {text!r}; it needs to be a number of bytes of "
            "address space, below 2**46."
        )
    return int(text)


def check_segment(process: int, fd: int, num_bytes: int) -> None:
    """Rejects a segment of another process whose properties are not as announced."""
    status = os.fstat(fd)
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    found = (status.st_uid, stat.S_IMODE(status.st_mode), status.st_size, seals & _SEALS)
    needed = (os.getuid(), 0o600, num_bytes, _SEALS)
    if found != needed:
        raise PermissionError(
            f"process {process} sent a segment with (user, mode, bytes, seals) {found}; it needs "
            f"to be {needed}"
        )


def listen() -> tuple[socket.socket, str]:
    """Opens a socket for the other processes; returns it and its name, which cannot be guessed.

    The name is not in the file system, so nothing is left behind. The system identifies the peer of
    a connection (see `user_and_pid`).
    """
    name = f"jax_cp_dispatch-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(128)
    return listener, name


def user_and_pid(connection: socket.socket) -> tuple[int, int]:
    """Returns user and process id of the peer, as known to the system."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = (int.from_bytes(raw[i : i + 4], "little", signed=True) for i in (0, 4, 8))
    return user, pid


_HELLO = struct.Struct("<i32s")  # process, and the token of the process it connects to
_SEGMENT = struct.Struct("<q")  # bytes
_SLICE_SECONDS = 0.2  # between checks whether another process has given up


class ConnectionInfo(NamedTuple):
    """How the other processes of its job reach a process."""

    socket_name: str
    token: str  # of 32 bytes, as hexadecimal digits


class Neighbour(NamedTuple):
    """A connected process. The extension reads the fields by name."""

    process: int
    pid: int
    socket_fd: int
    pid_fd: int  # -1: the system provides none
    segment_fd: int
    segment_bytes: int


def new_token() -> str:
    return secrets.token_hex(32)


def connect_all(
    listener: socket.socket,
    process: int,
    peers: Mapping[int, ConnectionInfo],
    segment: tuple[int, int],
    timeout: float,
    check_others: Callable[[], None] = lambda: None,
) -> list[Neighbour]:
    """Connects to the processes before this one, and waits for those after it.

    Args:
      peers: of all processes to connect, this one included.
      check_others: raises an OSError when another process has given up; called while waiting.
    Raises:
      OSError: a process cannot be reached within `timeout` seconds, or belongs to another user.
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
            connection.sendall(_HELLO.pack(process, bytes.fromhex(peers[other].token)))
        while len(connections) < len(peers) - 1:
            check_others()
            listener.settimeout(min(_SLICE_SECONDS, _left(end)))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() < end:
                    continue
                missing = sorted(peers.keys() - connections.keys() - {process})
                raise TimeoutError(
                    f"processes {missing} did not connect in {timeout:g} s"
                ) from None
            other = _greeted_by(connection, process, peers[process].token, end)
            if other is None or other in connections or other not in peers or other <= process:
                connection.close()  # not a process of the job
            else:
                connections[other] = connection
        return [
            _exchange_segments(connections[other], other, segment, end)
            for other in sorted(connections)
        ]
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _check_user(connection: socket.socket, other: int | str) -> None:
    user, _ = user_and_pid(connection)
    if user != os.getuid():
        raise PermissionError(f"process {other} belongs to user {user}, this one to {os.getuid()}")


def _greeted_by(connection: socket.socket, process: int, token: str, end: float) -> int | None:
    """Returns the process at the other end if it is of this user and knows the token."""
    connection.settimeout(min(5.0, _left(end)))
    try:
        _check_user(connection, "?")
        hello = connection.recv(_HELLO.size + 1)
    except OSError:
        return None
    if len(hello) != _HELLO.size:
        return None
    other, shown = _HELLO.unpack(hello)
    return other if secrets.compare_digest(shown, bytes.fromhex(token)) else None


def _exchange_segments(
    connection: socket.socket, other: int, segment: tuple[int, int], end: float
) -> Neighbour:
    connection.settimeout(_left(end))
    fd, num_bytes = segment
    socket.send_fds(connection, [_SEGMENT.pack(num_bytes)], [fd])
    message, fds, _, _ = socket.recv_fds(connection, _SEGMENT.size + 1, 1)
    if len(message) != _SEGMENT.size or len(fds) != 1:
        raise ConnectionError(f"process {other} closed the connection before its segment came")
    os.set_inheritable(fds[0], False)
    (other_bytes,) = _SEGMENT.unpack(message)
    check_segment(other, fds[0], other_bytes)
    _, pid = user_and_pid(connection)
    try:
        pid_fd = os.pidfd_open(pid)
    except OSError:  # old kernel or other namespace: the socket's end of file shows the exit too
        pid_fd = -1
    connection.setblocking(False)
    return Neighbour(other, pid, connection.detach(), pid_fd, fds[0], other_bytes)
