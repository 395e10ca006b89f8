"""The private memory and sockets through which the processes of a job share data."""

import fcntl
import os
import secrets
import socket
import stat
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
